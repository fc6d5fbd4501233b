//! The service as its users run it: processes on loopback, on free ports.

mod faults;
mod fleet;
mod reading;
mod wrong_use;
