//! What must be planned, and when: models that something happened to, models that wait for room, and models whose
//! time comes.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use pilotlight_domain::plan::Outlook;
use pilotlight_domain::{ModelName, Timestamp};

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Agenda {
    dirty: BTreeSet<ModelName>,
    due: BTreeSet<(Timestamp, ModelName)>,
    due_of: HashMap<ModelName, Timestamp>,
    /// What the last plan found out, for models that are not at rest.
    outlooks: BTreeMap<ModelName, Outlook>,
}

impl Agenda {
    /// Something happened to these.
    pub(crate) fn touch(&mut self, models: impl IntoIterator<Item = ModelName>) {
        self.dirty.extend(models);
    }

    /// Room may have come free: whoever waits for some is looked at again.
    pub(crate) fn touch_waiting(&mut self) {
        let waits = |outlook: &&Outlook| outlook.unplaced.is_some() || outlook.uncached.is_some();
        self.dirty.extend(self.outlooks.values().filter(waits).map(|outlook| outlook.model.clone()));
    }

    /// Takes what is to be planned now.
    pub(crate) fn take(&mut self, now: Timestamp) -> BTreeSet<ModelName> {
        while let Some((time, name)) = self.due.pop_first() {
            if time > now {
                self.due.insert((time, name));
                break;
            }
            self.due_of.remove(&name);
            self.dirty.insert(name);
        }
        std::mem::take(&mut self.dirty)
    }

    /// Notes what a plan of these models found out.
    pub(crate) fn note(&mut self, planned: &BTreeSet<ModelName>, found: Vec<Outlook>) {
        for name in planned {
            self.outlooks.remove(name);
            self.remind(name, None);
        }
        for outlook in found {
            self.remind(&outlook.model, outlook.due);
            self.outlooks.insert(outlook.model.clone(), outlook);
        }
    }

    /// Looks at a model again at `time`, or not by time.
    pub(crate) fn remind(&mut self, name: &ModelName, time: Option<Timestamp>) {
        if let Some(before) = self.due_of.remove(name) {
            self.due.remove(&(before, name.clone()));
        }
        if let Some(time) = time {
            self.due_of.insert(name.clone(), time);
            self.due.insert((time, name.clone()));
        }
    }

    /// What the last plan found out about a model that is not at rest.
    pub(crate) fn outlook(&self, name: &ModelName) -> Option<&Outlook> {
        self.outlooks.get(name)
    }

    /// Whether something is to be planned now.
    pub(crate) fn is_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// When something is to be planned if nothing happens.
    pub(crate) fn due(&self) -> Option<Timestamp> {
        self.due.first().map(|(time, _)| *time)
    }
}
