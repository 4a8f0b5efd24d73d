//! `pilotlight key new`: an API key, told once, and its line for the file of hashes.

use std::io::Read as _;

use serde_json::json;

use crate::args::{KeyCommand, KeyNewArgs};
use crate::failure::Failure;
use crate::output::print;

/// 256 bits: nobody guesses one.
const KEY_BYTES: usize = 32;

pub(crate) fn run(command: &KeyCommand) -> Result<(), Failure> {
    match command {
        KeyCommand::New(args) => new(args),
    }
}

fn new(args: &KeyNewArgs) -> Result<(), Failure> {
    let mut chance = [0; KEY_BYTES];
    // The system's own source of chance; it never blocks once the machine has started.
    std::fs::File::open("/dev/urandom").and_then(|mut source| source.read_exact(&mut chance))?;
    let key = chance.iter().fold("plk-".to_owned(), |text, byte| format!("{text}{byte:02x}"));
    let mut entry = json!({ "name": args.name, "hash": pilotlight_router::key_hash(&key) });
    if !args.model.is_empty() {
        entry["models"] = json!(args.model);
    }
    if args.output.format.is_document() {
        return args.output.format.print(&json!({ "key": key, "entry": entry }));
    }
    // JSON is YAML, and needs no thought about quotes.
    print(&format!("key, shown once:\n{key}\n\nline for the file of --api-keys:\n- {entry}\n"))
}
