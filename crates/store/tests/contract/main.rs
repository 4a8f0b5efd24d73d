//! What every store promises, tried on each adapter: the embedded store itself, the remote one over the embedded
//! store's HTTP face, and the remote one on a real Kubernetes API server, where its programs are built.

#![expect(clippy::unwrap_used, reason = "a failed test is what they are for")]

mod cluster;
mod crds;
mod objects;
mod ownership;
mod watches;
mod world;

use world::World;

/// Each promise is a function of a fresh world, and a test on each adapter.
macro_rules! contract {
    (everywhere: $($module:ident :: $promise:ident),* ; ours: $($own:ident :: $only:ident),* $(,)?) => {
        mod embedded {
            $(#[tokio::test] async fn $promise() { super::$module::$promise(super::World::embedded().await).await; })*
            $(#[tokio::test] async fn $only() { super::$own::$only(super::World::embedded().await).await; })*
        }
        mod face {
            $(#[tokio::test] async fn $promise() { super::$module::$promise(super::World::face().await).await; })*
            $(#[tokio::test] async fn $only() { super::$own::$only(super::World::face().await).await; })*
        }
        mod kubernetes {
            $(#[tokio::test] async fn $promise() {
                let Some(world) = super::World::kubernetes().await else { return };
                super::$module::$promise(world).await;
            })*
        }
    };
}

contract! {
    everywhere:
    objects::what_is_created_is_found_until_it_is_deleted,
    objects::apply_makes_and_changes,
    objects::an_unchanged_write_makes_no_version,
    objects::spec_and_status_have_separate_writers,
    objects::a_stale_version_or_uid_is_a_conflict,
    objects::mistakes_are_named_by_their_field,
    objects::namespaces_and_selectors_narrow_a_list,
    objects::a_merge_changes_what_it_names,
    ownership::finalizers_hold_a_deletion_back,
    ownership::owned_objects_go_with_their_owner,
    ownership::managers_take_away_only_their_own,
    ownership::a_lease_has_one_holder_and_can_be_taken_over,
    ownership::events_are_counted_not_repeated,
    watches::a_watch_from_a_list_misses_nothing,
    watches::a_watch_without_a_version_begins_with_what_is_there,
    watches::an_object_that_leaves_the_filter_is_deleted_to_its_watcher,
    watches::a_watch_resumes_where_it_was_cut;
    // How the embedded store ends, forgets and begins again; a script stands for the real one in tests/scripted.rs.
    ours:
    objects::a_restart_finds_everything_again,
    objects::a_closed_store_says_so,
    ownership::events_are_forgotten,
    watches::too_old_a_version_is_gone,
    watches::reflect_survives_a_restart,
    watches::reflect_lists_again_when_it_fell_behind,
}
