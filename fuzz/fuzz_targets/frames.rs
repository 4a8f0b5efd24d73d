//! See `pilotlight_engine::fuzzing::frames`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| pilotlight_engine::fuzzing::frames(data));
