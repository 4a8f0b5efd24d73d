//! A load: everything about it that takes time, on a thread of its own, so that it holds up nobody.
//!
//! Mapping, `config.json` and the tokenizer go on while the agent still reads the weights; the model is made when
//! all bytes are resident. Exactly one `Loaded` is the answer, and when it is an error nothing is mapped any more.

use std::error::Error;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread;

use pilotlight_loader::mapping::PoolMap;

use super::clock::Instant;
use super::exchange::{Control, Exchange};
use super::{build, memory};
use crate::kv::{KvLayout, KvPages};
use crate::model::{Model, ModelConfig};
use crate::protocol::{FileChunks, ModelKey};
use crate::text::ModelText;

/// What is to be loaded.
pub(super) struct Order {
    pub(super) model: ModelKey,
    pub(super) folder: PathBuf,
    pub(super) files: Vec<FileChunks>,
    pub(super) kv_chunks: Vec<u32>,
}

/// A model that can serve.
pub(super) struct Built {
    pub(super) model: Model,
    pub(super) kv: KvPages,
    pub(super) text: Arc<ModelText>,
}

/// Every byte is resident.
#[derive(Clone, Copy, Debug)]
pub(super) enum Weights {
    /// The device computes from the pool.
    InPlace,
    /// They are in the device's memory from then on; none: never.
    CopiedAt(Option<Instant>),
}

/// Starts a load. Send [`Weights`] once, when every byte is resident; drop the sender to give the load up.
pub(super) fn start(order: Order, pool: PoolMap, exchange: Arc<Exchange>) -> io::Result<SyncSender<Weights>> {
    let (resident, all_resident) = sync_channel(1);
    let name = format!("load-{}", order.model.0);
    let work = move || {
        let key = order.model;
        let loaded = catch_unwind(AssertUnwindSafe(|| load(&order, &pool, &exchange, &all_resident)));
        let loaded =
            loaded.unwrap_or_else(|_| Err("the loading thread panicked: see the worker's log".into()));
        exchange.submit(Control::Loaded(key, loaded.map(Box::new)));
    };
    thread::Builder::new().name(name).spawn(work)?;
    Ok(resident)
}

fn load(
    order: &Order,
    pool: &PoolMap,
    exchange: &Exchange,
    resident: &Receiver<Weights>,
) -> Result<Built, String> {
    let told = |error: &dyn Error| chain(error);
    let config_path = order.folder.join("config.json");
    let config =
        std::fs::read(&config_path).map_err(|error| format!("read {}: {error}", config_path.display()))?;
    let config = ModelConfig::parse(&config).map_err(|error| told(&error))?;
    let text = Arc::new(ModelText::open(&order.folder).map_err(|error| told(&error))?);
    if !exchange.submit(Control::Text(order.model, text.clone())) {
        return Err("the worker is ending".into());
    }
    let files = memory::map_files(pool, &order.files).map_err(|error| told(&error))?;
    let mut kv = KvPages::new(KvLayout::of(&config));
    kv.add(memory::map_kv(pool, &order.kv_chunks).map_err(|error| told(&error))?);
    if kv.pages_total() == 0 {
        return Err(format!(
            "{} for keys and values do not hold one page of {} bytes: grant more host memory",
            kv.bytes_total(),
            kv.layout().page_bytes()
        ));
    }
    wait_for_weights(resident, exchange)?;
    let model = build::model(config, &files).map_err(|error| told(&error))?;
    Ok(Built { model, kv, text })
}

/// Until every byte is where the device computes from.
fn wait_for_weights(resident: &Receiver<Weights>, exchange: &Exchange) -> Result<(), String> {
    let given_up = || "the load was given up".to_owned();
    match resident.recv().map_err(|_| given_up())? {
        Weights::InPlace => Ok(()),
        Weights::CopiedAt(None) => Err("the device copies nothing: its bandwidth is 0".into()),
        Weights::CopiedAt(Some(at)) => {
            let gone = || matches!(resident.try_recv(), Err(TryRecvError::Disconnected));
            let copied = exchange.clock().wait(at, &mut || exchange.is_closed() || gone());
            if copied { Ok(()) } else { Err(given_up()) }
        }
    }
}

/// An error with its causes, on one line.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
