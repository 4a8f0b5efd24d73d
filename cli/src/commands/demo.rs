//! `pilotlight demo`: a cold start of the demo model, which travels inside the program, so that nothing else is needed.

use std::fs;
use std::path::{Path, PathBuf};

use pilotlight_domain::Phases;
use pilotlight_kit::Stop;
use pilotlight_loader::readers::ReaderKind;
use pilotlight_store::{ClusterStore as _, Kind, ObjectRef};
use serde::Serialize;
use serde_json::{Value, json};

use crate::args::{DemoArgs, NodeArgs};
use crate::commands::{chat, explain};
use crate::failure::Failure;
use crate::output::print;
use crate::server::{Server, store};
use crate::up::{self, UpSettings};

/// The demo model, file by file.
const FILES: [(&str, &[u8]); 5] = [
    ("config.json", include_bytes!("../../../models/demo/config.json")),
    ("generation_config.json", include_bytes!("../../../models/demo/generation_config.json")),
    ("model.safetensors", include_bytes!("../../../models/demo/model.safetensors")),
    ("tokenizer.json", include_bytes!("../../../models/demo/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../../models/demo/tokenizer_config.json")),
];

/// What one demo came to.
#[derive(Debug, Serialize)]
struct Report {
    /// The answer.
    text: String,
    /// From the request's arrival to its first token.
    ttft_seconds: f64,
    /// The same, taken apart: these add up to it.
    phases: Phases,
    /// Of tensors.
    bytes_loaded: u64,
    /// The device.
    served_by: String,
}

/// Starts everything, asks once from cold, shows where the time went; then leaves the server running, or stops.
pub(crate) async fn run(args: DemoArgs, log: String, stop: Stop) -> Result<(), Failure> {
    let temporary = match &args.data_dir {
        Some(_) => None,
        None => Some(tempdir()?),
    };
    let data_dir =
        args.data_dir.clone().or_else(|| temporary.as_ref().map(|t| t.0.clone())).unwrap_or_default();
    let running = up::start(settings(&data_dir, log), stop.clone()).await?;
    let asked = ask(&args, running.url(), &data_dir).await;
    match asked {
        Ok(report) if args.output.is_document() => args.output.print(&report)?,
        Ok(report) => print(&for_people(&report))?,
        Err(failure) => {
            stop.stop();
            running.ended().await;
            return Err(failure);
        }
    }
    if args.once {
        stop.stop();
    } else if !args.output.is_document() {
        let url = running.url();
        print(&format!(
            "\nStill running at {url}; Ctrl-C stops it. Try, in another terminal:\n  pilotlight chat demo --server {url}\n  pilotlight get models -o wide --server {url}\n"
        ))?;
    }
    running.ended().await;
    Ok(())
}

fn settings(data_dir: &Path, log: String) -> UpSettings {
    UpSettings {
        data_dir: data_dir.to_owned(),
        listen: "127.0.0.1:0".into(),
        api_keys: None,
        node: NodeArgs {
            host_memory: pilotlight_domain::ByteCount::from_mib(128),
            disk: pilotlight_domain::ByteCount::from_gib(1),
            device: vec![pilotlight_node_agent::DeviceSpec::Cpu],
            reader: ReaderKind::Auto,
        },
        nodes: 1,
        manifests: Vec::new(),
        log,
    }
}

async fn ask(args: &DemoArgs, url: &str, data_dir: &Path) -> Result<Report, Failure> {
    let folder = unpack(data_dir)?;
    let manifest = json!({
        "apiVersion": "pilotlight.dev/v1alpha1",
        "kind": "Model",
        "metadata": { "name": "demo", "namespace": "default" },
        "spec": { "source": { "uri": format!("file://{}", folder.display()) } },
    });
    let store = store(url)?;
    store.apply_object(Kind::Model, manifest).await?;
    let quiet = args.output.is_document();
    if !quiet {
        print(&format!(
            "Pilotlight is up at {url}. The demo model is cold: nothing of it is loaded.\n\n> {}\n\n",
            args.message
        ))?;
    }
    let body = json!({
        "model": "demo", "stream": true, "max_tokens": args.max_tokens, "seed": 1, "temperature": 0.7,
        "messages": [{ "role": "user", "content": args.message }],
    });
    let mut text = String::new();
    let headers = chat::stream(&Server::new(url)?, &body, &mut |delta| {
        text.push_str(delta);
        if quiet { Ok(()) } else { print(delta) }
    })
    .await?;
    if !quiet {
        print("\n")?;
    }
    let header = |name: &str| headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or_default().to_owned();
    let served_by = header("x-pilotlight-served-by");
    let status = cold_start(&store).await?;
    let last = &status["coldStart"]["last"];
    Ok(Report {
        text,
        ttft_seconds: last["totalSeconds"].as_f64().unwrap_or_default(),
        phases: serde_json::from_value(last["phases"].clone())?,
        bytes_loaded: status["resolved"]["sizeBytes"].as_u64().unwrap_or_default(),
        served_by,
    })
}

/// Waits until the router's report of the cold start has reached the Model's status.
async fn cold_start(store: &pilotlight_store::RemoteStore) -> Result<Value, Failure> {
    use futures::StreamExt as _;
    use pilotlight_store::{Change, Filter};
    let filter = Filter::namespace("default").name("demo");
    let reported = |model: &Value| model["status"]["coldStart"]["last"].is_object();
    let waiting = async {
        let current = store.get_object(&ObjectRef::new(Kind::Model, "default", "demo")).await?;
        if reported(&current) {
            return Ok(current["status"].clone());
        }
        let mut changes =
            store.watch_objects(Kind::Model, &filter, pilotlight_store::Version::of(&current)).await?;
        while let Some(change) = changes.next().await {
            if let Change::Applied(model) = change?
                && reported(&model)
            {
                return Ok(model["status"].clone());
            }
        }
        Err(Failure::new("the cold start was never reported"))
    };
    tokio::time::timeout(std::time::Duration::from_secs(10), waiting)
        .await
        .unwrap_or_else(|_| Err(Failure::new("the cold start was not reported within 10 s")))
}

fn unpack(data_dir: &Path) -> Result<PathBuf, Failure> {
    let folder = data_dir.join("demo-model");
    fs::create_dir_all(&folder)?;
    for (name, bytes) in FILES {
        fs::write(folder.join(name), bytes)?;
    }
    Ok(folder.canonicalize()?)
}

fn for_people(report: &Report) -> String {
    use pilotlight_domain::{ByteCount, Phase};
    let size = ByteCount::new(report.bytes_loaded);
    let mut text = format!(
        "\nFirst token after {:.0} ms, from cold: {size} of weights, served by {}.\n",
        report.ttft_seconds * 1000.0,
        report.served_by
    );
    for phase in Phase::ALL {
        let seconds = report.phases.get(phase);
        if seconds > 0.0 {
            text.push_str(&format!(
                "  {:<8} {:>8.1} ms   {}\n",
                phase.as_str(),
                seconds * 1000.0,
                explain::about(phase)
            ));
        }
    }
    text
}

/// A folder that goes away with its holder.
struct TempDir(PathBuf);

impl Drop for TempDir {
    fn drop(&mut self) {
        let _best_effort = fs::remove_dir_all(&self.0);
    }
}

fn tempdir() -> Result<TempDir, Failure> {
    let base = std::env::temp_dir();
    for attempt in 0..100u32 {
        let path = base.join(format!("pilotlight-demo-{}-{attempt}", std::process::id()));
        match fs::create_dir(&path) {
            Ok(()) => return Ok(TempDir(path.canonicalize()?)),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => {
                return Err(Failure::new(format!("make a folder in {}: {error}", base.display()))
                    .cure("name one with --data-dir"));
            }
        }
    }
    Err(Failure::new(format!("no free name in {}", base.display())).cure("name a folder with --data-dir"))
}
