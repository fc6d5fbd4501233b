//! Tests of the service as its users run it: as processes on free loopback ports.

mod faults;
mod fleet;
mod limits;
mod local;
mod reading;
mod sharing;
mod wrong_use;
