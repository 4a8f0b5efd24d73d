//! See `pilotlight_router::fuzzing::request`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| pilotlight_router::fuzzing::request(data));
