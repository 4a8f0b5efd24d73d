//! Which Model is meant by a name that several want: the oldest keeps it.
//!
//! The router asks it to resolve what clients send, the operator to tell those who lost a name; so both say the same.
//!
//! Invariant: the answer does not depend on the order in which Models became known. It deliberately does **not** know
//! `namespace/name`, which always means one Model.

use std::collections::{BTreeSet, HashMap};

use crate::ModelName;

/// When it was made, in seconds, and for those of one second the name: the smallest keeps what several want.
type Claim = (u64, ModelName);

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Names {
    /// Never empty.
    wanted: HashMap<String, BTreeSet<Claim>>,
    by_model: HashMap<ModelName, (u64, BTreeSet<String>)>,
}

impl Names {
    /// Whose name it is.
    pub fn owner(&self, name: &str) -> Option<&ModelName> {
        self.wanted.get(name)?.first().map(|(_, model)| model)
    }

    /// What the model wants to be called from now on. Gives the models that may have won or lost a name by it, itself
    /// included; none if nothing changed.
    pub fn put(
        &mut self,
        model: &ModelName,
        created_seconds: u64,
        names: impl IntoIterator<Item = String>,
    ) -> BTreeSet<ModelName> {
        let wants = (created_seconds, names.into_iter().collect::<BTreeSet<String>>());
        if self.by_model.get(model) == Some(&wants) {
            return BTreeSet::new();
        }
        let mut touched = self.remove(model);
        for name in &wants.1 {
            let claims = self.wanted.entry(name.clone()).or_default();
            claims.insert((created_seconds, model.clone()));
            touched.extend(claims.iter().take(2).map(|(_, model)| model.clone()));
        }
        touched.insert(model.clone());
        self.by_model.insert(model.clone(), wants);
        touched
    }

    /// The model is gone. Gives the models that may have won a name by it, and itself if it was known.
    pub fn remove(&mut self, model: &ModelName) -> BTreeSet<ModelName> {
        let mut touched = BTreeSet::new();
        let Some((created, names)) = self.by_model.remove(model) else { return touched };
        let claim = (created, model.clone());
        for name in names {
            let Some(claims) = self.wanted.get_mut(&name) else { continue };
            claims.remove(&claim);
            match claims.first() {
                Some((_, heir)) => drop(touched.insert(heir.clone())),
                None => drop(self.wanted.remove(&name)),
            }
        }
        touched.insert(model.clone());
        touched
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(name: &str) -> ModelName {
        ModelName::new("default", name).unwrap()
    }

    fn put(names: &mut Names, name: &str, created: u64, wants: &[&str]) -> Vec<String> {
        let touched = names.put(&model(name), created, wants.iter().map(|n| (*n).to_owned()));
        touched.into_iter().map(|m| m.name).collect()
    }

    fn owner(names: &Names, name: &str) -> Option<String> {
        names.owner(name).map(|m| m.name.clone())
    }

    #[test]
    fn the_oldest_keeps_a_name_whoever_came_first_and_its_heir_is_told() {
        let mut names = Names::default();
        assert_eq!(put(&mut names, "young", 2, &["chat", "fast"]), ["young"]);
        assert_eq!(put(&mut names, "old", 1, &["chat"]), ["old", "young"]);
        assert_eq!(owner(&names, "chat").as_deref(), Some("old"));
        assert_eq!(owner(&names, "fast").as_deref(), Some("young"));
        assert!(put(&mut names, "old", 1, &["chat"]).is_empty(), "nothing changed");
        assert_eq!(names.remove(&model("old")).len(), 2);
        assert_eq!(owner(&names, "chat").as_deref(), Some("young"));
        assert_eq!(put(&mut names, "young", 2, &[]), ["young"]);
        assert_eq!(owner(&names, "chat"), None);
    }

    #[test]
    fn a_third_who_wants_a_name_changes_nothing_for_the_others() {
        let mut names = Names::default();
        put(&mut names, "a", 1, &["chat"]);
        put(&mut names, "b", 2, &["chat"]);
        assert_eq!(put(&mut names, "c", 3, &["chat"]), ["a", "b", "c"]);
        assert_eq!(put(&mut names, "b", 2, &["other"]), ["a", "b"]);
        assert_eq!(owner(&names, "chat").as_deref(), Some("a"));
    }
}
