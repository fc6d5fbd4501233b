//! Checks that the type of a column fits its kind of feature in `[features]`.

use datafusion::arrow::datatypes::DataType;
use onefold_datasets::SparseFeature;

use super::IdType;
use super::values::{OPTIONS, item_type};
use crate::config::FeatureKind;
use crate::error::MessageAndHint;

/// Returns the reason why a column cannot be a feature, a clause that follows the name of the feature, and a hint.
fn wrong(data_type: &DataType, reason: &str, hint: String) -> Option<MessageAndHint> {
    Some((format!("whose type is {data_type}, {reason}"), hint))
}

/// Returns the reason why a label, weight or dense feature cannot have this type, or `None` if it can.
pub(crate) fn wrong_number_type(column: &str, data_type: &DataType) -> Option<MessageAndHint> {
    if data_type.is_numeric() || *data_type == DataType::Boolean {
        return None;
    }
    let hint = if item_type(data_type).is_some() {
        format!("take one item, as `{column}[1]`, or make it `kind = \"sparse\"` or `kind = \"sequence\"`")
    } else if IdType::of(data_type).is_some() {
        format!(
            "if the texts are numbers, write `TRY_CAST({column} AS DOUBLE)` in the query, which is null for other texts; if \
             they are names, make it `kind = \"sparse\"` with `ids = \"hash\"` or `vocabulary = \"frequency\"`"
        )
    } else {
        format!("make a number of it in the query, for example with `CAST` or `date_part('hour', {column})`")
    };
    wrong(data_type, "but a number or boolean is needed", hint)
}

/// Returns the reason why a sparse or sequence feature of the samples cannot have this type, or `None` if it can.
pub(crate) fn wrong_list_type(
    kind: FeatureKind,
    feature: &SparseFeature,
    column: &str,
    data_type: &DataType,
) -> Option<MessageAndHint> {
    if let Some(item) = item_type(data_type) {
        return match IdType::of(item) {
            Some(id_type) => unnumbered(feature, column, data_type, id_type, "BIGINT[]"),
            None if item_type(item).is_some() => {
                let hint = format!("make one list of the lists in the query: `flatten({column})`");
                wrong(data_type, "but a list of ids is needed, not of lists", hint)
            }
            None => wrong(data_type, NOT_IDS, convert(column, item, "BIGINT[]")),
        };
    }
    if kind == FeatureKind::Sequence {
        let hint = match IdType::of(data_type) {
            Some(IdType::Text) => format!(
                "split the text in the query: `split_ids({column}, '|')`; then {OPTIONS}; or make it `kind = \"sparse\"`"
            ),
            _ => format!("make a list of it in the query, as `[{column}]`, or make it `kind = \"sparse\"`"),
        };
        return wrong(data_type, "but a sequence needs a list", hint);
    }
    wrong_item_type(feature, column, data_type)
}

/// Returns the reason why single ids cannot have this type, or `None` if they can.
pub(crate) fn wrong_item_type(
    feature: &SparseFeature,
    column: &str,
    data_type: &DataType,
) -> Option<MessageAndHint> {
    match IdType::of(data_type) {
        Some(id_type) => unnumbered(feature, column, data_type, id_type, "BIGINT"),
        None => wrong(data_type, NOT_IDS, convert(column, data_type, "BIGINT")),
    }
}

const NOT_IDS: &str = "but ids are integers, texts, booleans or binary values";

/// Refuses ids that are not integers if the feature has neither `ids = "hash"` nor a vocabulary.
fn unnumbered(
    feature: &SparseFeature,
    column: &str,
    data_type: &DataType,
    id_type: IdType,
    integers: &str,
) -> Option<MessageAndHint> {
    if !matches!(id_type, IdType::Text | IdType::Binary)
        || feature.ids.is_some()
        || feature.vocabulary.is_some()
    {
        return None;
    }
    let numbers = match id_type {
        IdType::Text => {
            format!(
                "; if the texts are integers, `CAST({column} AS {integers})` in the query turns them into numbers, `007` \
                 into 7"
            )
        }
        _ => String::new(),
    };
    wrong(data_type, "and a dataset stores ids as integers", format!("{OPTIONS}{numbers}"))
}

/// Returns the hint for values that are not ids.
fn convert(column: &str, data_type: &DataType, integers: &str) -> String {
    match data_type {
        DataType::Struct(_) => format!("take a field of it in the query, as `{column}['name']`"),
        DataType::Map(..) => format!("take its keys in the query: `map_keys({column})`"),
        DataType::Null => "it has no values at all; leave the feature out".to_owned(),
        time if time.is_temporal() => format!(
            "take a part of the time in the query, as `date_part('hour', {column})`, or a text, as `CAST({column} AS VARCHAR)`"
        ),
        number if number.is_floating() => format!(
            "if its values are whole numbers, write `whole_id({column})` in the query; if it is a quantity, make it `kind = \
             \"dense\"`"
        ),
        _ => format!(
            "if its values are whole numbers, write `CAST({column} AS {integers})` in the query; if it is a quantity, make it \
             `kind = \"dense\"`"
        ),
    }
}
