//! `pilotlight get`: resources as a table or a document, once or as they change.

use futures::StreamExt as _;
use pilotlight_api::columns::{self, Column};
use pilotlight_kit::clock::{Clock as _, SystemClock};
use pilotlight_store::{Change, ClusterStore as _, Filter, StoreError, Verdict};
use serde_json::{Value, json};

use crate::args::GetArgs;
use crate::failure::Failure;
use crate::output::{Format, Table, print};
use crate::server::{store, store_kind, unreachable_hint};

/// Lists, then watches if asked to.
pub(crate) async fn run(args: GetArgs) -> Result<(), Failure> {
    let store = store(&args.server.server)?;
    let kind = store_kind(args.kind);
    let mut filter =
        if kind.namespaced() { Filter::namespace(&args.server.namespace) } else { Filter::all() };
    if let Some(name) = &args.name {
        filter = filter.name(name);
    }
    let refuse = |e: StoreError| unreachable_hint(&e, &args.server.server);
    let listed = store.list_objects(kind, &filter).await.map_err(refuse)?;
    if let (Some(name), true) = (&args.name, listed.items.is_empty()) {
        return Err(Failure::new(format!("{} `{name}` not found", kind.name()))
            .cure(format!("`pilotlight get {}` lists what there is", plural(&args))));
    }
    show_all(&args, &listed.items)?;
    if !args.watch {
        return Ok(());
    }
    let mut from = listed.version;
    loop {
        let mut changes = match store.watch_objects(kind, &filter, Some(from.clone())).await {
            Ok(changes) => changes,
            // What happened meanwhile is forgotten: show what is there now.
            Err(error) if error.verdict() == Verdict::Relist => {
                let listed = store.list_objects(kind, &filter).await.map_err(refuse)?;
                show_all(&args, &listed.items)?;
                from = listed.version;
                continue;
            }
            Err(error) => return Err(refuse(error)),
        };
        while let Some(change) = changes.next().await {
            match change {
                Ok(Change::Applied(object)) => {
                    from = pilotlight_store::Version::of(&object).unwrap_or(from);
                    show_one(&args, &object)?;
                }
                Ok(Change::Deleted(object)) => from = pilotlight_store::Version::of(&object).unwrap_or(from),
                Ok(Change::Bookmark(version)) => from = version,
                Err(error) if error.verdict() == Verdict::GiveUp => return Err(refuse(error)),
                Err(_) => break,
            }
        }
    }
}

fn plural(args: &GetArgs) -> &'static str {
    match args.kind {
        crate::args::Kind::Models => "models",
        crate::args::Kind::Nodes => "nodes",
        crate::args::Kind::Replicas => "replicas",
    }
}

fn show_all(args: &GetArgs, items: &[Value]) -> Result<(), Failure> {
    match args.output.format {
        Format::Json | Format::Yaml => args
            .output
            .format
            .print(&json!({ "apiVersion": "v1", "kind": "List", "metadata": {}, "items": items })),
        _ if items.is_empty() && !args.watch => {
            print(&format!("no {} in namespace {}\n", plural(args), args.server.namespace))
        }
        _ => print(&table(args, items, true)),
    }
}

fn show_one(args: &GetArgs, object: &Value) -> Result<(), Failure> {
    match args.output.format {
        Format::Json | Format::Yaml => args.output.format.print(object),
        _ => print(&table(args, std::slice::from_ref(object), false)),
    }
}

fn table(args: &GetArgs, items: &[Value], with_header: bool) -> String {
    let (wide, now) = (args.output.format == Format::Wide, SystemClock.now());
    let columns: Vec<&Column> =
        columns::of(store_kind(args.kind).name()).iter().filter(|column| wide || !column.wide).collect();
    let header: Vec<String> = columns.iter().map(|column| column.name.to_uppercase()).collect();
    let mut table = Table::new(header);
    for object in items {
        table.row(columns.iter().map(|column| match column.cell(object, now) {
            Value::String(text) => text,
            other => other.to_string(),
        }));
    }
    let text = table.render();
    if with_header { text } else { text.split_once('\n').map_or(String::new(), |(_, rows)| rows.to_owned()) }
}
