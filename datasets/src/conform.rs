//! Converts record batches from other sources to the columns of a schema.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, make_array};
use arrow::datatypes::{DataType, Field, FieldRef, Schema as ArrowSchema, SchemaRef};

use crate::lists::with_values;
use crate::{Error, Result};

/// Returns the columns of `batch` in the order and with the types of `schema`. Where the schema requires a
/// `List`, a `ListView` is accepted and kept. No values are copied.
///
/// # Errors
///
/// [`Error::Fault`] if a column is missing or has another type, or if it contains nulls but is not nullable.
pub(crate) fn conform(batch: &RecordBatch, schema: &SchemaRef) -> Result<RecordBatch> {
    if batch.schema_ref() == schema {
        return Ok(batch.clone());
    }
    let columns = schema.fields().iter().map(|field| conform_column(batch, field));
    let columns = columns.collect::<Result<Vec<_>>>()?;
    if schema.fields().iter().zip(&columns).all(|(field, column)| field.data_type() == column.data_type()) {
        return Ok(RecordBatch::try_new(Arc::clone(schema), columns)?);
    }
    let fields = schema.fields().iter().zip(&columns);
    let fields = fields
        .map(|(field, column)| Field::new(field.name(), column.data_type().clone(), field.is_nullable()));
    Ok(RecordBatch::try_new(Arc::new(ArrowSchema::new(fields.collect::<Vec<_>>())), columns)?)
}

/// Returns the column of `batch` for `field`. The name and nullability of list items may differ from the
/// field's; nulls are rejected where the field is not nullable.
fn conform_column(batch: &RecordBatch, field: &FieldRef) -> Result<ArrayRef> {
    let wrong = |message: String| {
        Error::column(
            field.name(),
            message,
            match field.is_nullable() {
                true => format!("the dataset's schema asks for {}", field.data_type()),
                false => format!("the dataset's schema asks for {} without nulls", field.data_type()),
            },
        )
    };
    let column = batch.column_by_name(field.name()).ok_or_else(|| wrong("it is missing".to_owned()))?;
    if column.null_count() > 0 && !field.is_nullable() {
        return Err(wrong(format!("it has {} nulls", column.null_count())));
    }
    match (column.data_type(), field.data_type()) {
        (DataType::List(found) | DataType::ListView(found), DataType::List(item))
            if found.data_type() == item.data_type() =>
        {
            match nulls_in_lists(column) {
                0 => with_values(column, item, without_nulls),
                nulls => Err(wrong(format!("its lists hold {nulls} nulls"))),
            }
        }
        (found, expected) if found == expected => Ok(Arc::clone(column)),
        (found, _) => Err(wrong(format!("it has type {found}"))),
    }
}

/// Removes the validity buffer of `values`, none of whose nulls is in a list.
fn without_nulls(values: &ArrayRef) -> Result<ArrayRef> {
    if values.nulls().is_none() {
        return Ok(Arc::clone(values));
    }
    Ok(make_array(values.to_data().into_builder().nulls(None).build()?))
}

/// Counts the nulls in the lists of a column. A null in several lists counts once for each.
fn nulls_in_lists(column: &ArrayRef) -> usize {
    let nulls_of =
        |values: &ArrayRef, start: i32, size: i32| values.slice(start as usize, size as usize).null_count();
    if let Some(lists) = column.as_list_opt::<i32>() {
        let (start, end) = (lists.offsets()[0], lists.offsets()[lists.len()]);
        return nulls_of(lists.values(), start, end - start);
    }
    let lists = column.as_list_view::<i32>();
    let views = lists.offsets().iter().zip(lists.sizes().iter()).filter(|_| lists.values().null_count() > 0);
    views.map(|(start, size)| nulls_of(lists.values(), *start, *size)).sum()
}

#[cfg(test)]
mod tests {
    use arrow::array::{Int64Array, ListViewArray};
    use arrow::datatypes::Int64Type;

    use super::*;
    use crate::schema::item_field;

    /// Returns a batch with one column of views into the ids `1 null 2`.
    fn views(offsets: Vec<i32>, sizes: Vec<i32>) -> RecordBatch {
        let ids = Arc::new(Int64Array::from(vec![Some(1), None, Some(2)]));
        let item = Arc::new(Field::new("item", DataType::Int64, true));
        let lists = ListViewArray::try_new(item, offsets.into(), sizes.into(), ids, None).unwrap();
        RecordBatch::try_from_iter([("ids", Arc::new(lists) as ArrayRef)]).unwrap()
    }

    #[test]
    fn nulls_outside_of_all_lists_are_ignored() {
        let field = Field::new("ids", DataType::List(item_field()), false);
        let schema = Arc::new(ArrowSchema::new(vec![field]));
        let conformed = conform(&views(vec![2, 0, 1], vec![1, 1, 0]), &schema).unwrap();
        let lists = conformed.column(0).as_list_view::<i32>();
        let ids = |row| lists.value(row).as_primitive::<Int64Type>().values().to_vec();
        assert_eq!([ids(0), ids(1), ids(2)], [vec![2], vec![1], vec![]]);
        assert_eq!(lists.values().null_count(), 0);
        let error = conform(&views(vec![0, 1], vec![2, 2]), &schema).unwrap_err().to_string();
        assert!(error.contains("column `ids`: its lists hold 2 nulls"), "{error}");
    }
}
