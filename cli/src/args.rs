//! The command line, as `--help` teaches it.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use pilotlight_domain::ByteCount;
use pilotlight_kit::log::LogSettings;
use pilotlight_loader::readers::ReaderKind;
use pilotlight_node_agent::DeviceSpec;

use crate::output::Format;

const AFTER_HELP: &str = "\
Try it:
  pilotlight demo                       a cold start of the built-in demo model, explained
  pilotlight up                         everything on this machine
  pilotlight apply -f model.yaml        a Model: a name and source.uri are enough
  pilotlight chat my-model              talk to it

Commands that talk to a running system find it by --server or PILOTLIGHT_SERVER.
Exit codes: 0 done, 1 failed, 2 the command line makes no sense.";

const UP_EXAMPLES: &str = "\
Examples:
  pilotlight up
  pilotlight up --host-memory 16GiB --data-dir /srv/pilotlight -f models.yaml
  pilotlight up --nodes 2 --device cpu --device sim:start=4s,copy=8GiB/s
It prints `ready URL` on standard output once it serves; SIGTERM drains and ends it.";
const APPLY_EXAMPLES: &str = "\
A manifest, in full:
  apiVersion: pilotlight.dev/v1alpha1
  kind: Model
  metadata: { name: my-model }
  spec: { source: { uri: \"file:///models/Llama-3.2-1B-Instruct\" } }";
const GET_EXAMPLES: &str = "\
Examples:
  pilotlight get models -w
  pilotlight get nodes -o wide
  pilotlight get models my-model -o yaml";
const CHAT_EXAMPLES: &str = "\
Examples:
  pilotlight chat my-model
  pilotlight chat my-model -m 'One line about the sea.' --max-tokens 40 --seed 7
  pilotlight chat my-model -m - < letter.txt";
const MIGRATE_EXAMPLES: &str = "\
Example:
  pilotlight sessions
  pilotlight migrate 9b6179c244b600efa879c087e5483ac6 --to node-1
The stream goes on meanwhile. Exit code 1, and the reason, if it did not move.";

/// Serverless model serving: a model costs nothing while nobody calls it, and wakes in the time it takes to move its bytes.
#[derive(Parser)]
#[command(name = "pilotlight", version, about, after_help = AFTER_HELP, propagate_version = true, max_term_width = 110)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    #[command(flatten)]
    pub(crate) log: LogSettings,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Runs everything on this machine: router, operator, store and node agents.
    #[command(after_help = UP_EXAMPLES)]
    Up(UpArgs),
    /// A cold start of the built-in demo model: the streamed answer, and where the time went.
    Demo(DemoArgs),
    /// Creates or changes resources from a manifest.
    #[command(after_help = APPLY_EXAMPLES)]
    Apply(ApplyArgs),
    /// Deletes a resource.
    Delete(DeleteArgs),
    /// Shows resources.
    #[command(after_help = GET_EXAMPLES)]
    Get(GetArgs),
    /// Says why: where a model would wake, what it would cost, and what the last cold start cost.
    Explain(ExplainArgs),
    /// Talks to a model: interactively, or once with a message.
    #[command(after_help = CHAT_EXAMPLES)]
    Chat(ChatArgs),
    /// Lists what is being generated, where it runs, and how it moved; ended sessions stay for ten minutes.
    Sessions(SessionsArgs),
    /// Shows one session with its moves and their pauses.
    Session(SessionArgs),
    /// Moves a session to another node while it goes on; returns when it runs there.
    #[command(after_help = MIGRATE_EXAMPLES)]
    Migrate(MigrateArgs),
    /// Takes a node out of service: its sessions move away; returns when none is left.
    Drain(DrainArgs),
    /// Works with API keys.
    #[command(subcommand)]
    Key(KeyCommand),
    /// Works with checkpoints on disk.
    #[command(subcommand)]
    Checkpoint(CheckpointCommand),
    /// Runs the operator alone.
    Operator(OperatorArgs),
    /// Runs the router alone.
    Router(RouterArgs),
    /// Runs a node's agent alone.
    Agent(Box<AgentArgs>),
    /// Runs one device's worker; started by an agent.
    #[command(hide = true)]
    Worker(WorkerArgs),
    /// Lists every metric of every part as JSON; the reference page is made from it.
    #[command(hide = true)]
    Metrics,
    /// Prints a completion script for a shell.
    Completions {
        /// Which shell.
        shell: clap_complete::Shell,
    },
}

/// How to reach a running system.
#[derive(Args, Clone)]
pub(crate) struct ServerArgs {
    /// Its address, as `pilotlight up` printed it.
    #[arg(long, env = "PILOTLIGHT_SERVER", default_value = "http://127.0.0.1:8080", value_name = "URL")]
    pub(crate) server: String,
    /// Where the resources live.
    #[arg(long, short, default_value = "default", value_name = "NAME")]
    pub(crate) namespace: String,
    /// Sent to the OpenAI API, where the server wants one.
    #[arg(long, env = "PILOTLIGHT_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub(crate) api_key: Option<String>,
}

/// How a command says what it found.
#[derive(Args, Clone)]
pub(crate) struct OutputArgs {
    /// How it is printed: for people, or as one document for programs.
    #[arg(id = "output", long, short, value_enum, value_name = "FORMAT", default_value_t)]
    pub(crate) format: Format,
}

#[derive(Subcommand)]
pub(crate) enum KeyCommand {
    /// Makes a key: prints it, once, and the line for the file that `--api-keys` names.
    New(KeyNewArgs),
}

#[derive(Args)]
pub(crate) struct KeyNewArgs {
    /// Whose key: in logs, never sent.
    pub(crate) name: String,
    /// A model that it may use, or `NAMESPACE/*`; may be repeated. Default: every model.
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: Vec<String>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Args)]
pub(crate) struct UpArgs {
    /// Where everything is kept; made if it is missing. Default: the platform's data folder.
    #[arg(long, value_name = "DIR")]
    pub(crate) data_dir: Option<PathBuf>,
    /// One address for everything: the OpenAI API, health and metrics, and, for this machine alone, the management API.
    #[arg(long, default_value = "127.0.0.1:8080", value_name = "HOST:PORT")]
    pub(crate) listen: String,
    /// A file of API keys for the OpenAI API; `pilotlight key new` makes its lines. Without it anybody may call who reaches
    /// the address, so an address beyond this machine needs it.
    #[arg(long, value_name = "FILE")]
    pub(crate) api_keys: Option<PathBuf>,
    /// Serves beyond this machine without API keys: whoever reaches the address may use every model.
    #[arg(long, conflicts_with = "api_keys")]
    pub(crate) insecure_no_auth: bool,
    #[command(flatten)]
    pub(crate) node: NodeArgs,
    /// So many nodes, each with an agent of its own and the sizes above.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) nodes: u16,
    /// Manifests to apply at the start; may be repeated.
    #[arg(long, short, value_name = "FILE")]
    pub(crate) filename: Vec<PathBuf>,
}

/// What a node offers.
#[derive(Args, Clone)]
pub(crate) struct NodeArgs {
    /// Host memory for weights and KV pages together.
    #[arg(long, default_value = "2GiB", value_name = "SIZE")]
    pub(crate) host_memory: ByteCount,
    /// Disk for checkpoints.
    #[arg(long, default_value = "50GiB", value_name = "SIZE")]
    pub(crate) disk: ByteCount,
    /// A device: `cpu`, or `sim:key=value,…`; may be repeated.
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    pub(crate) device: Vec<DeviceSpec>,
    /// How files are read.
    #[arg(long, default_value_t = ReaderKind::Auto, value_name = "auto|uring|pread")]
    pub(crate) reader: ReaderKind,
}

impl NodeArgs {
    /// An agent's settings that offer this; the rest is as usual.
    pub(crate) fn settings(self, node: String, data_dir: PathBuf) -> pilotlight_node_agent::Settings {
        pilotlight_node_agent::Settings {
            node,
            data_dir,
            host_memory: self.host_memory,
            disk: self.disk,
            device: self.device,
            listen: "127.0.0.1:0".into(),
            admin_listen: None,
            advertise: None,
            reader: self.reader,
            source_root: Vec::new(),
        }
    }
}

#[derive(Args)]
pub(crate) struct DemoArgs {
    /// Stops after the answer; else the server is left running until Ctrl-C.
    #[arg(long)]
    pub(crate) once: bool,
    /// What to say to the model.
    #[arg(long, short, default_value = "Speak to me of love and of the night.")]
    pub(crate) message: String,
    /// At most so many tokens.
    #[arg(long, default_value_t = 120)]
    pub(crate) max_tokens: u32,
    /// Where everything is kept; default: a temporary folder, so that every demo starts cold.
    #[arg(long, value_name = "DIR")]
    pub(crate) data_dir: Option<PathBuf>,
    /// `table` streams the answer as it comes; `json` and `yaml` print one document at the end.
    #[arg(long, short, value_enum, default_value_t)]
    pub(crate) output: Format,
}

#[derive(Args)]
pub(crate) struct ApplyArgs {
    /// YAML or JSON, one or more documents; `-` is standard input. May be repeated.
    #[arg(long, short, required = true, value_name = "FILE")]
    pub(crate) filename: Vec<String>,
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// The kinds of resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    /// What people write.
    #[value(name = "models", aliases = ["model", "mdl", "models.pilotlight.dev"])]
    Models,
    /// The nodes and what they hold.
    #[value(name = "nodes", aliases = ["node", "modelnodes", "modelnode", "mn"])]
    Nodes,
    /// What each node was ordered to hold.
    #[value(name = "replicas", aliases = ["replica", "modelreplicas", "modelreplica", "mr"])]
    Replicas,
}

#[derive(Args)]
pub(crate) struct DeleteArgs {
    /// What kind.
    #[arg(required_unless_present = "filename")]
    pub(crate) kind: Option<Kind>,
    /// Which.
    #[arg(required_unless_present = "filename")]
    pub(crate) name: Option<String>,
    /// Deletes what a manifest names instead.
    #[arg(long, short, value_name = "FILE", conflicts_with_all = ["kind", "name"])]
    pub(crate) filename: Option<String>,
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

#[derive(Args)]
pub(crate) struct GetArgs {
    /// What kind.
    pub(crate) kind: Kind,
    /// Only this one.
    pub(crate) name: Option<String>,
    /// Goes on: prints what changes.
    #[arg(long, short)]
    pub(crate) watch: bool,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

#[derive(Args)]
pub(crate) struct ExplainArgs {
    /// What kind; only models can be explained.
    pub(crate) kind: Kind,
    /// Which.
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

#[derive(Args)]
pub(crate) struct ChatArgs {
    /// Which model.
    pub(crate) name: String,
    /// Says this and prints the answer, instead of a conversation; `-` reads it from standard input.
    #[arg(long, short)]
    pub(crate) message: Option<String>,
    /// Said before the conversation, as the system.
    #[arg(long)]
    pub(crate) system: Option<String>,
    /// At most so many tokens in an answer.
    #[arg(long)]
    pub(crate) max_tokens: Option<u32>,
    /// 0 always says the same.
    #[arg(long)]
    pub(crate) temperature: Option<f32>,
    /// Same seed, same words.
    #[arg(long)]
    pub(crate) seed: Option<u64>,
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

#[derive(Args)]
pub(crate) struct SessionsArgs {
    /// Goes on: prints what changes.
    #[arg(long, short)]
    pub(crate) watch: bool,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

#[derive(Args)]
pub(crate) struct SessionArgs {
    /// Its id: the `x-request-id` of its response; further choices have `.1`, `.2` … behind it.
    pub(crate) id: String,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

#[derive(Args)]
pub(crate) struct MigrateArgs {
    /// Which session: the `x-request-id` of its response.
    pub(crate) id: String,
    /// The node to go to; the model is loaded there if need be.
    #[arg(long, value_name = "NODE")]
    pub(crate) to: String,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

#[derive(Args)]
pub(crate) struct DrainArgs {
    /// Which node.
    pub(crate) node: String,
    /// Takes it back into service instead.
    #[arg(long)]
    pub(crate) undo: bool,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

#[derive(Subcommand)]
pub(crate) enum CheckpointCommand {
    /// Rewrites a Hugging Face folder for loading: still safetensors, aligned, in execution order, with checksums.
    Convert {
        /// A Hugging Face folder, or one of ours.
        src: PathBuf,
        /// The folder to make; it must not exist, and it does not unless everything succeeded.
        dest: PathBuf,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Shows what a checkpoint holds.
    Inspect {
        /// The folder.
        path: PathBuf,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Checks every byte of a checkpoint of ours; of a plain Hugging Face folder its structure.
    Verify {
        /// The folder.
        path: PathBuf,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Reads a checkpoint once, as a load does, and says how near that came to the device's limit.
    Bench {
        /// The folder.
        path: PathBuf,
        /// Measures the best raw O_DIRECT rate too, in alternation.
        #[arg(long)]
        raw: bool,
        /// How it is read.
        #[arg(long, default_value_t = ReaderKind::Auto, value_name = "auto|uring|pread")]
        reader: ReaderKind,
        #[command(flatten)]
        output: OutputArgs,
    },
}

/// How a part alone finds its cluster.
#[derive(Args, Clone)]
pub(crate) struct ClusterArgs {
    /// A kubeconfig file; default: as kubectl finds it, or the pod's own account.
    #[arg(long, env = "KUBECONFIG", value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
}

#[derive(Args)]
pub(crate) struct OperatorArgs {
    #[command(flatten)]
    pub(crate) cluster: ClusterArgs,
    /// Where routers push demand to.
    #[arg(long, default_value = "127.0.0.1:8082", value_name = "HOST:PORT")]
    pub(crate) listen: String,
    /// Health and metrics on an address of their own; default: on the same.
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) admin_listen: Option<String>,
    #[command(flatten)]
    pub(crate) settings: pilotlight_operator::Settings,
}

#[derive(Args)]
pub(crate) struct RouterArgs {
    #[command(flatten)]
    pub(crate) cluster: ClusterArgs,
    /// The OpenAI API.
    #[arg(long, default_value = "127.0.0.1:8080", value_name = "HOST:PORT")]
    pub(crate) listen: String,
    /// Health, metrics and the sessions' API on an address of their own; default: on the same, the sessions' for this
    /// machine alone.
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) admin_listen: Option<String>,
    /// From the first signal to the end: streams may finish meanwhile.
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    pub(crate) drain_seconds: u32,
    #[command(flatten)]
    pub(crate) settings: pilotlight_router::Settings,
}

#[derive(Args)]
pub(crate) struct AgentArgs {
    #[command(flatten)]
    pub(crate) cluster: ClusterArgs,
    /// The node's name in the cluster.
    #[arg(long)]
    pub(crate) node: String,
    /// Where checkpoints and the ledger are kept; made if it is missing. Default: the platform's data folder.
    #[arg(long, value_name = "DIR")]
    pub(crate) data_dir: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) offer: NodeArgs,
    /// Sessions, health and metrics.
    #[arg(long, default_value = "127.0.0.1:0", value_name = "HOST:PORT")]
    pub(crate) listen: String,
    /// Health and metrics on an address of their own; default: on the same.
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) admin_listen: Option<String>,
    /// How routers reach it; default: the address it listens on.
    #[arg(long, value_name = "URL")]
    pub(crate) advertise: Option<String>,
    /// From the first signal to the end: sessions move away or finish meanwhile.
    #[arg(long, default_value_t = 25, value_name = "SECONDS")]
    pub(crate) drain_seconds: u32,
    /// Ends when the process that started it ends.
    #[arg(long, hide = true)]
    pub(crate) die_with_parent: bool,
}

#[derive(Args)]
pub(crate) struct WorkerArgs {
    /// The device it computes on.
    #[arg(long)]
    pub(crate) device: String,
    /// With `--device sim`: what it is like, as in `start=4s,copy=8GiB/s,memory=16GiB,speed=4x`. It computes with this
    /// machine's processor: slower than `1x` it takes longer, faster it is as fast as the processor.
    #[arg(long, value_name = "KEY=VALUE,…")]
    pub(crate) sim: Option<String>,
    /// Forces lower kernels than the machine offers: scalar, avx2, avx512, avx512-bf16.
    #[arg(long)]
    pub(crate) kernels: Option<String>,
    /// Threads that compute; default: one per core.
    #[arg(long)]
    pub(crate) threads: Option<usize>,
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::Cli;

    /// Two flags of one id are found out only when a command line is read.
    #[test]
    fn every_command_is_read_from_its_shortest_line() {
        for line in [
            "up",
            "demo",
            "apply -f model.yaml",
            "delete model my-model",
            "get models",
            "explain model my-model",
            "chat my-model",
            "sessions",
            "session 9b61",
            "migrate 9b61 --to node-1",
            "drain node-1",
            "key new me",
            "checkpoint convert from to",
            "checkpoint inspect folder",
            "checkpoint verify folder",
            "checkpoint bench folder",
            "operator",
            "router",
            "agent --node node-1",
            "worker --device cpu",
            "metrics",
            "completions bash",
        ] {
            let words = ["pilotlight"].into_iter().chain(line.split(' '));
            assert!(Cli::try_parse_from(words).is_ok(), "{line}");
        }
    }
}
