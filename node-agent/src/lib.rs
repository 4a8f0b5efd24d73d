//! One per node: tiers, ledger, loads, workers and sessions.
