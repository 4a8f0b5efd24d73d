//! The openings of sessions on this node, by session and epoch: who may be sent a command, and what is told of them.
//!
//! One session may be open twice for a while, as source and as target of a move; the epoch of its opening tells them
//! apart. As many openings as there are places for sessions: nothing else is stored.
//!
//! It deliberately carries no command out: a session's own task does.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pilotlight_domain::session::SessionCommand;
use pilotlight_domain::{ModelName, SessionId};
use serde::Serialize;
use tokio::sync::mpsc;

/// Commands that a session has not taken up: a move is three rounds, a freeze and a release.
const COMMANDS_MAX: usize = 8;

type Key = (SessionId, u32);

/// What is told of an opening.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Told {
    id: SessionId,
    epoch: u32,
    model: ModelName,
    /// The device that serves it; none while it waits.
    device: Option<String>,
    /// Tokens generated so far, replayed ones included.
    generated: u32,
}

/// All openings. Cheap to clone.
#[derive(Clone, Default)]
pub(super) struct Table(Arc<Mutex<BTreeMap<Key, Opening>>>);

struct Opening {
    told: Told,
    commands: mpsc::Sender<SessionCommand>,
}

/// Why a command was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NotTaken {
    /// No such opening.
    Unknown,
    /// It has more to do already than a move ever asks for.
    Busy,
}

impl Table {
    /// Enters an opening until the answer is dropped. One of the same name that is still there is told of no more.
    pub(super) fn enter(&self, id: SessionId, epoch: u32, model: ModelName, generated: u32) -> Listed {
        let (sender, commands) = mpsc::channel(COMMANDS_MAX);
        let told = Told { id: id.clone(), epoch, model, device: None, generated };
        self.map().insert((id.clone(), epoch), Opening { told, commands: sender.clone() });
        Listed { table: self.clone(), key: (id, epoch), own: sender, commands }
    }

    /// Hands a command to an opening. Never waits.
    pub(super) fn command(
        &self,
        id: &SessionId,
        epoch: u32,
        command: SessionCommand,
    ) -> Result<(), NotTaken> {
        let map = self.map();
        let opening = map.get(&(id.clone(), epoch)).ok_or(NotTaken::Unknown)?;
        opening.commands.try_send(command).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => NotTaken::Busy,
            mpsc::error::TrySendError::Closed(_) => NotTaken::Unknown,
        })
    }

    /// All of them, by session.
    pub(super) fn told(&self) -> Vec<Told> {
        self.map().values().map(|opening| opening.told.clone()).collect()
    }

    fn map(&self) -> MutexGuard<'_, BTreeMap<Key, Opening>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An opening's own entry; dropping it takes it away.
pub(super) struct Listed {
    table: Table,
    key: Key,
    own: mpsc::Sender<SessionCommand>,
    commands: mpsc::Receiver<SessionCommand>,
}

impl Listed {
    /// The next command. Dropping it half-way is safe.
    pub(super) async fn command(&mut self) -> SessionCommand {
        match self.commands.recv().await {
            Some(command) => command,
            // We hold a sender ourselves.
            None => std::future::pending().await,
        }
    }

    pub(super) fn runs_on(&self, device: &str) {
        self.change(|told| told.device = Some(device.to_owned()));
    }

    pub(super) fn generated(&self, tokens: u32) {
        self.change(|told| told.generated = tokens);
    }

    fn change(&self, change: impl FnOnce(&mut Told)) {
        if let Some(opening) =
            self.table.map().get_mut(&self.key).filter(|o| o.commands.same_channel(&self.own))
        {
            change(&mut opening.told);
        }
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        let mut map = self.table.map();
        if map.get(&self.key).is_some_and(|opening| opening.commands.same_channel(&self.own)) {
            map.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id() -> SessionId {
        "r1".parse().unwrap()
    }

    fn enter(table: &Table, epoch: u32) -> Listed {
        table.enter(id(), epoch, ModelName::new("default", "m").unwrap(), 0)
    }

    #[tokio::test]
    async fn commands_go_to_the_opening_of_that_epoch() {
        let table = Table::default();
        let (mut source, mut target) = (enter(&table, 0), enter(&table, 1));
        table.command(&id(), 1, SessionCommand::Extend { at: 0, ids: vec![7] }).unwrap();
        table.command(&id(), 0, SessionCommand::Freeze).unwrap();
        assert_eq!(source.command().await, SessionCommand::Freeze);
        assert_eq!(target.command().await, SessionCommand::Extend { at: 0, ids: vec![7] });
        assert_eq!(table.command(&id(), 2, SessionCommand::Freeze), Err(NotTaken::Unknown));
        drop(source);
        assert_eq!(table.command(&id(), 0, SessionCommand::Freeze), Err(NotTaken::Unknown));
        for _ in 0..COMMANDS_MAX {
            table.command(&id(), 1, SessionCommand::Freeze).unwrap();
        }
        assert_eq!(table.command(&id(), 1, SessionCommand::Freeze), Err(NotTaken::Busy));
    }

    #[test]
    fn a_later_opening_of_the_same_name_stays_when_the_earlier_one_ends() {
        let table = Table::default();
        let earlier = enter(&table, 0);
        let later = enter(&table, 0);
        earlier.generated(5);
        drop(earlier);
        later.runs_on("cpu");
        let told = table.told();
        assert_eq!((told.len(), told[0].generated, told[0].device.as_deref()), (1, 0, Some("cpu")));
        drop(later);
        assert!(table.told().is_empty());
    }
}
