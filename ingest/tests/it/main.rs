//! Builds datasets with `onefold-ingest` from raw logs of every kind, in folders and in an S3 server.

mod columns;
#[cfg(feature = "delta")]
mod delta;
mod evolution;
mod examples;
mod features;
mod ids;
mod init;
mod keep;
mod logs;
mod merge;
mod partitions;
mod parts;
mod rows;
mod s3;
mod samples;
mod shard;
mod sources;
mod statistics;
mod times;
mod types;
mod writers;
