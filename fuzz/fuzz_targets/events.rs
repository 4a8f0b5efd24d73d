//! See `pilotlight_router::fuzzing::events`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| pilotlight_router::fuzzing::events(data));
