//! Process kit: settings, logs, metrics, the admin server, stopping, backoff and clocks.
