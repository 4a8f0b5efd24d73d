//! Statuses as a table: what happened to the one model on one node, and what people read then.

use pilotlight_api::conditions::ConditionStatus;
use pilotlight_api::model::Source;
use pilotlight_api::{
    ModelNode, ModelNodeStatus, ModelReplica, ModelReplicaStatus, ModelSpec, Reason, ReplicaPhase,
};
use pilotlight_domain::plan::{Step, plan};
use pilotlight_store::Reflected;
use std::time::Duration;

use super::*;
use crate::agenda::Agenda;

struct Life {
    index: Index,
    agenda: Agenda,
    now: Timestamp,
    name: ModelName,
}

impl Life {
    fn new(change: impl FnOnce(&mut ModelSpec)) -> Life {
        let source = Source { uri: "file:///m".into(), ..Source::default() };
        let mut spec: ModelSpec = serde_json::from_value(serde_json::json!({ "source": source })).unwrap();
        change(&mut spec);
        let mut model = Model::new("m", spec);
        (model.metadata.namespace, model.metadata.uid) = (Some("default".into()), Some("u".into()));
        let mut index = Index::default();
        index.on_models(Reflected::Restarted(vec![model]));
        let name = ModelName::new("default", "m").unwrap();
        Life { index, agenda: Agenda::default(), now: Timestamp::from_micros(1_000_000_000_000), name }
    }

    fn node(mut self) -> Life {
        let mut node = ModelNode::new("n1", Default::default());
        let tier = |kind: &str| pilotlight_api::node::TierStatus {
            kind: kind.into(),
            capacity_bytes: 1 << 30,
            ..Default::default()
        };
        let cpu = pilotlight_api::node::DeviceStatus { kind: "Cpu".into(), ..Default::default() };
        node.status = Some(ModelNodeStatus {
            tiers: vec![tier("disk"), tier("host")],
            devices: vec![cpu],
            ..Default::default()
        });
        self.index.on_nodes(Reflected::Restarted(vec![node]), self.now);
        self
    }

    fn held(mut self, held: u32) -> Life {
        let now = self.now;
        self.index.view.change_demand(&self.name, |d| d.set(0, held, None, now, Duration::from_secs(60)));
        self
    }

    fn later(mut self, seconds: u64) -> Life {
        self.now = self.now + Duration::from_secs(seconds);
        self
    }

    /// Plans; the agent answers each order with this.
    fn agent(mut self, phase: ReplicaPhase, change: impl Fn(&mut ModelReplicaStatus)) -> Life {
        let planned = plan(&self.index.view, self.now);
        self.agenda.note(&[self.name.clone()].into(), planned.outlook);
        let mut replicas: Vec<ModelReplica> = Vec::new();
        for step in planned.steps {
            let Step::Order(order) = step else { continue };
            let generation = self.index.next_generation(&order.node, self.now);
            let model = self.index.model(&order.model).unwrap();
            replicas.push(crate::apply::render(&order, model, generation, Duration::ZERO));
        }
        let node = "n1".parse().unwrap();
        if replicas.is_empty() {
            replicas.extend(self.index.replica(&self.name, &node).cloned());
        }
        for mut replica in replicas {
            let mut status = ModelReplicaStatus {
                order_generation: replica.spec.order_generation,
                phase,
                ..ModelReplicaStatus::default()
            };
            change(&mut status);
            replica.status = Some(status);
            self.index.put_replica(replica, self.now);
        }
        let outlook = plan(&self.index.view, self.now).outlook;
        self.agenda.note(&[self.name.clone()].into(), outlook);
        self
    }

    fn status(&self) -> ModelStatus {
        status(&Facts {
            name: &self.name,
            model: self.index.model(&self.name).unwrap(),
            entry: self.index.view.model(&self.name).unwrap(),
            index: &self.index,
            outlook: self.agenda.outlook(&self.name),
            costs: &Costs::default(),
            now: self.now,
        })
    }

    /// `Phase ready/desired`, then the conditions that are not what all is well with.
    #[track_caller]
    fn check(mut self, expect: &str) -> Life {
        let status = self.status();
        let mut text = format!("{:?} {}", status.phase, status.ready);
        for c in &status.conditions {
            let usual = [Reason::DemandFresh, Reason::Idle, Reason::NothingToPlace, Reason::Resolved];
            if !(c.status == ConditionStatus::True && usual.contains(&c.reason)) {
                text += &format!(" {:?}={:?}/{:?}", c.kind, c.status, c.reason);
            }
        }
        assert_eq!(text, expect);
        self.index.set_status(&self.name.clone(), status);
        self
    }
}

fn resolved(size: u64) -> impl Fn(&mut ModelReplicaStatus) {
    move |status| {
        status.resolved =
            Some(Resolved { size_bytes: size, files: 1, digest: "sha256:1".into(), ..Resolved::default() });
    }
}

const IDLE: &str = "Idle 0/0 Ready=True/IdleAtZero Cached=True/Cached";

#[test]
fn from_nothing_to_serving_and_back() {
    let life = Life::new(|_| {})
        .check("Pending 0/0 Ready=Unknown/Pending SourceResolved=Unknown/Pending Cached=False/Downloading");
    let life = life
        .node()
        .agent(ReplicaPhase::Staging, |_| {})
        .check("Resolving 0/0 Ready=Unknown/Pending SourceResolved=Unknown/Pending Cached=False/Downloading Progressing=True/Moving");
    let life = life
        .agent(ReplicaPhase::Staging, resolved(1 << 20))
        .check("Caching 0/0 Ready=Unknown/Downloading Cached=False/Downloading Progressing=True/Moving");
    let life = life.agent(ReplicaPhase::Ready, resolved(1 << 20)).check(IDLE);
    let life = life.held(1).agent(ReplicaPhase::Loading, |_| {}).check(
        "Warming 0/1 Ready=True/Warming Cached=True/Cached Placed=True/Placed Progressing=True/Moving",
    );
    let life = life
        .agent(ReplicaPhase::Ready, |_| {})
        .check("Ready 1/1 Ready=True/Serving Cached=True/Cached Placed=True/Placed");
    let life = life.held(0).later(301).agent(ReplicaPhase::Draining, |_| {}).check(IDLE);
    life.agent(ReplicaPhase::Ready, |_| {}).check(IDLE);
}

#[test]
fn failures_have_their_reason_everywhere() {
    let failed = |reason| {
        Life::new(|_| {}).node().agent(ReplicaPhase::Failed, move |status| {
            status.reason = Some(reason);
            status.message = "no".into();
        })
    };
    failed(Reason::UnsupportedArchitecture).check(
        "Failed 0/0 Ready=False/UnsupportedArchitecture SourceResolved=False/UnsupportedArchitecture Cached=False/UnsupportedArchitecture",
    );
    failed(Reason::InsufficientCache)
        .check("Failed 0/0 Ready=False/InsufficientCache SourceResolved=Unknown/Pending Cached=False/InsufficientCache");
}

#[test]
fn what_never_fits_says_so_before_anybody_asks() {
    Life::new(|_| {})
        .node()
        .agent(ReplicaPhase::Ready, resolved(2 << 30))
        .check("Idle 0/0 Ready=False/InsufficientMemory Cached=True/Cached Placed=False/InsufficientMemory");
}

#[test]
fn suspended_is_not_broken() {
    Life::new(|spec| spec.suspend = true)
        .node()
        .agent(ReplicaPhase::Ready, resolved(1 << 20))
        .check("Suspended 0/0 Ready=False/Suspended Cached=True/Cached ScalingActive=False/Suspended");
}

#[test]
fn a_load_that_does_not_move_is_said_to() {
    let life = Life::new(|_| {}).node().agent(ReplicaPhase::Ready, resolved(1 << 20)).check(IDLE).held(1);
    life.agent(ReplicaPhase::Loading, |_| {}).later(1800).check(
        "Warming 0/1 Ready=True/Warming Cached=True/Cached Placed=True/Placed Progressing=False/ProgressDeadlineExceeded",
    );
}

#[test]
fn times_move_only_with_the_status() {
    let life = Life::new(|_| {}).node().agent(ReplicaPhase::Ready, resolved(1 << 20)).check(IDLE);
    let before = life.status();
    let life = life.later(100);
    assert_eq!(life.status(), before, "nothing happened");
    let life = life.held(1).agent(ReplicaPhase::Ready, |_| {});
    let after = life.status();
    let time = |status: &ModelStatus, kind| {
        let found = status.conditions.iter().find(|c| c.kind == kind);
        found.map(|c| c.last_transition_time.clone())
    };
    use pilotlight_api::ConditionKind::{Placed, Ready};
    // Ready stays True for another reason.
    assert_eq!((time(&after, Ready), time(&after, Placed)), (time(&before, Ready), time(&before, Placed)));
    assert!(is_urgent(Some(&before), &after) && !is_urgent(Some(&after), &after));
}

#[test]
fn a_name_that_an_older_model_has_is_told_and_won_when_that_one_goes() {
    let mut life = Life::new(|spec| spec.aliases = vec!["fast".into()]).node();
    life = life.agent(ReplicaPhase::Ready, resolved(1 << 20)).check(IDLE);
    // Of the same second, and first by name.
    let mut older = life.index.model(&life.name).unwrap().clone();
    older.metadata.name = Some("a".into());
    older.metadata.uid = Some("other".into());
    older.spec.served_name = "m".into();
    older.spec.aliases.clear();
    let touched = life.index.on_models(Reflected::Applied(older.clone()));
    assert!(touched.contains(&life.name), "its status must be looked at again");
    let status = life.status();
    assert_eq!((status.phase, status.served_names), (ModelPhase::Idle, vec!["fast".to_owned()]));
    let ready = &status.conditions[0];
    assert_eq!((ready.status, ready.reason), (ConditionStatus::False, Reason::NameConflict));
    assert_eq!(
        ready.message,
        "`m` means the older Model default/a; `default/m` always means this one: choose another \
         spec.servedName or alias"
    );
    assert!(life.index.on_models(Reflected::Deleted(older)).contains(&life.name));
    let _as_before = life.check(IDLE);
}
