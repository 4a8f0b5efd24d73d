//! kubectl's tables: the columns of a kind and their cells, ready to print.

use std::sync::Arc;

use pilotlight_api::columns::{self, Column, Content};
use pilotlight_domain::Timestamp;
use serde_json::{Value, json};

use crate::Kind;

/// Whether a table says what its columns are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rows {
    WithColumns,
    /// Further tables of one watch.
    Alone,
}

/// Objects as a `meta.k8s.io/v1` Table.
pub(super) fn table(
    kind: Kind,
    objects: &[Arc<Value>],
    version: &Value,
    now: Timestamp,
    rows: Rows,
) -> Value {
    let columns = columns::of(kind.name());
    let definition = |column: &Column| {
        let wide = u8::from(column.wide);
        let format = if column.name == "Name" { "name" } else { "" };
        let kind = if column.content == Content::Number { "integer" } else { "string" };
        json!({ "name": column.name, "type": kind, "format": format, "priority": wide, "description": column.path })
    };
    let row = |object: &Arc<Value>| {
        let cells: Vec<Value> = columns.iter().map(|column| column.cell(object, now)).collect();
        let part = json!({
            "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"],
        });
        json!({ "cells": cells, "object": part })
    };
    let definitions: Vec<Value> =
        if rows == Rows::WithColumns { columns.iter().map(definition).collect() } else { Vec::new() };
    json!({
        "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": { "resourceVersion": version },
        "columnDefinitions": definitions, "rows": objects.iter().map(row).collect::<Vec<_>>(),
    })
}
