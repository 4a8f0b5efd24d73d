//! A dashboard as Grafana 10 and later import it.

use serde_json::{Value, json};

use super::{Dashboard, Panel};

const WIDTH: u32 = 24;
const DATASOURCE: &str = "${datasource}";

pub(super) fn dashboard(name: &str, dashboard: &Dashboard) -> Value {
    let mut variables = vec![json!({
        "name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source",
    })];
    variables.extend(dashboard.variables.iter().map(|name| variable(name)));
    json!({
        "uid": format!("pilotlight-{name}"),
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["pilotlight"],
        "editable": true,
        "graphTooltip": 1,
        "refresh": "30s",
        "schemaVersion": 39,
        "time": { "from": "now-1h", "to": "now" },
        "timezone": "browser",
        "links": [{
            "type": "dashboards", "tags": ["pilotlight"], "title": "Pilotlight", "asDropdown": true,
            "includeVars": true, "keepTime": true,
        }],
        "templating": { "list": variables },
        "panels": panels(dashboard),
    })
}

fn variable(name: &str) -> Value {
    let query = match name {
        "model" => "label_values(pilotlight_operator_model_phase{namespace=~\"$namespace\"}, model)",
        "node" => "label_values(pilotlight_agent_sessions, node)",
        _ => "label_values(pilotlight_operator_model_phase, namespace)",
    };
    json!({
        "name": name, "type": "query", "query": { "query": query, "refId": name },
        "datasource": { "type": "prometheus", "uid": DATASOURCE },
        "includeAll": true, "multi": true, "allValue": ".*", "refresh": 2, "sort": 1,
        "current": { "text": "All", "value": "$__all" },
    })
}

fn panels(dashboard: &Dashboard) -> Vec<Value> {
    let (mut made, mut y) = (Vec::new(), 0);
    for row in &dashboard.rows {
        let id = made.len() + 1;
        made.push(json!({
            "id": id, "type": "row", "title": row.title, "collapsed": false, "panels": [],
            "gridPos": { "x": 0, "y": y, "w": WIDTH, "h": 1 },
        }));
        y += 1;
        let (mut x, mut height) = (0, 0);
        for panel in &row.panels {
            let stat = panel.kind == "stat";
            let (w, h) = (panel.width.unwrap_or(if stat { 6 } else { 8 }), if stat { 4 } else { 8 });
            if x + w > WIDTH {
                (x, y, height) = (0, y + height, 0);
            }
            made.push(self::panel(made.len() + 1, panel, &json!({ "x": x, "y": y, "w": w, "h": h })));
            (x, height) = (x + w, height.max(h));
        }
        y += height;
    }
    made
}

fn panel(id: usize, panel: &Panel, place: &Value) -> Value {
    let targets: Vec<Value> = panel
        .queries
        .iter()
        .zip('A'..='Z')
        .map(|(query, letter)| {
            json!({
                "refId": letter.to_string(), "expr": query.expr, "legendFormat": query.legend,
                "datasource": { "type": "prometheus", "uid": DATASOURCE },
            })
        })
        .collect();
    let stacking = json!({ "mode": if panel.stack { "normal" } else { "none" } });
    let custom = json!({ "fillOpacity": if panel.stack { 40 } else { 8 }, "stacking": stacking, "showPoints": "never" });
    let options = if panel.kind == "stat" {
        json!({ "reduceOptions": { "calcs": ["lastNotNull"] }, "colorMode": "value" })
    } else {
        json!({ "legend": { "displayMode": "list", "placement": "bottom" }, "tooltip": { "mode": "multi" } })
    };
    json!({
        "id": id, "type": panel.kind, "title": panel.title, "description": panel.description, "gridPos": place,
        "datasource": { "type": "prometheus", "uid": DATASOURCE },
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit, "min": 0, "custom": custom,
                "thresholds": { "mode": "absolute", "steps": steps(panel) },
            },
            "overrides": [],
        },
        "options": options,
        "targets": targets,
    })
}

/// From the lowest value up; the first step has none.
fn steps(panel: &Panel) -> Vec<Value> {
    let given = if panel.decreasing.is_empty() { &panel.increasing } else { &panel.decreasing };
    let mut steps: Vec<(&str, f64)> = given.iter().map(|(colour, &from)| (colour.as_str(), from)).collect();
    steps.sort_by(|a, b| a.1.total_cmp(&b.1));
    if steps.is_empty() {
        steps.push(("green", 0.0));
    }
    let value = |n: usize, from: f64| if n == 0 { Value::Null } else { json!(from) };
    steps.iter().enumerate().map(|(n, (c, from))| json!({ "color": c, "value": value(n, *from) })).collect()
}
