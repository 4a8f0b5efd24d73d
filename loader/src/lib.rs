//! A byte's way: checkpoint format, readers, host pool, device copies.
