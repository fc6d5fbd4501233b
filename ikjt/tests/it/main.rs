//! Tests that write small datasets of many shapes and read them back.

mod added_features;
mod any_ranks;
mod bad_input;
mod batches;
mod by_hand;
mod columns_beside;
mod dataset;
mod kept;
mod labels_as_of;
mod memory;
mod order;
mod several_files;
mod source;
mod vacuum;
