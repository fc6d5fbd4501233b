//! The service as its users run it: processes on loopback, on free ports.

mod faults;
mod fleet;
mod limits;
mod local;
mod reading;
mod sharing;
mod wrong_use;
