//! Raw logs of every kind, in folders and in an S3 server, and what `onefold-ingest` makes of them.

mod columns;
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
