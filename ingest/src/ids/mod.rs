//! Converts the ids of features from the types in logs to the 64-bit integers of a dataset.
//!
//! | type of the column, or of its list's items | as it is | `ids = "hash"` | vocabulary |
//! |---|---|---|---|
//! | integers, up to 64 bits signed | the integer | hash of its decimal text | the integer |
//! | unsigned 64-bit integers | the integer if it is below 2^63 | hash of its decimal text | its decimal text |
//! | booleans | 0 or 1 | hash of `true` or `false` | `true` or `false` |
//! | texts, dictionaries and enums of texts | refused | hash of the UTF-8 bytes | the text |
//! | binary | refused | hash of the bytes | the bytes as a text |
//!
//! The result is always an `i64`: an integer, a hash ([`onefold_datasets::hash_id`]), or the number that
//! [`TextIds`](onefold_datasets::TextIds) assigns to a text. If the feature has a vocabulary, the vocabulary replaces
//! these ids by ranks when samples are written.

mod check;
mod forms;
pub(crate) mod functions;
#[cfg(test)]
mod tests;
mod values;

pub(crate) use self::check::{wrong_item_type, wrong_list_type, wrong_number_type};
pub(crate) use self::forms::FeatureIds;
pub(crate) use self::functions::timeline_function;
pub(crate) use self::values::{IdForm, IdType, item_type, list_ids, scalar_ids};
