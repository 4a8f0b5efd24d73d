//! Telling the operator what is wanted: [`ledger`] counts, [`wake`] reports.

mod ledger;
mod wake;

pub(crate) use ledger::Ledger;
pub(crate) use wake::{Body, Demand, Session};
