//! See `pilotlight_loader::fuzzing::safetensors`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| pilotlight_loader::fuzzing::safetensors(data));
