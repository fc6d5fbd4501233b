//! Record batches from elsewhere, made to have exactly the columns of a schema.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, ListArray, RecordBatch, make_array};
use arrow::datatypes::{DataType, FieldRef, SchemaRef};

use crate::{Error, Result};

/// The columns of `batch` in the order and types of `schema`, none of whose columns is nullable. Copies no values.
///
/// # Errors
///
/// [`Error::Column`] if a column is missing, has another type, or holds nulls.
pub(crate) fn conform(batch: &RecordBatch, schema: &SchemaRef) -> Result<RecordBatch> {
    if batch.schema_ref() == schema {
        return Ok(batch.clone());
    }
    let columns = schema.fields().iter().map(|field| conform_column(batch, field));
    Ok(RecordBatch::try_new(Arc::clone(schema), columns.collect::<Result<Vec<_>>>()?)?)
}

/// The column of `batch` for `field`. The name and nullability of a list's items are the query's affair; a
/// null is nobody's.
fn conform_column(batch: &RecordBatch, field: &FieldRef) -> Result<ArrayRef> {
    let wrong = |message: String| Error::Column {
        column: field.name().clone(),
        message,
        hint: format!("the dataset's schema asks for {} without nulls", field.data_type()),
    };
    let column = batch.column_by_name(field.name()).ok_or_else(|| wrong("it is missing".to_owned()))?;
    if column.null_count() > 0 {
        return Err(wrong(format!("it has {} nulls", column.null_count())));
    }
    match (column.data_type(), field.data_type()) {
        (DataType::List(found), DataType::List(item)) if found.data_type() == item.data_type() => {
            let lists = column.as_list::<i32>();
            let (start, end) = (lists.offsets()[0] as usize, lists.offsets()[lists.len()] as usize);
            let nulls = lists.values().slice(start, end - start).null_count();
            if nulls > 0 {
                return Err(wrong(format!("its lists hold {nulls} nulls")));
            }
            let values = make_array(lists.values().to_data().into_builder().nulls(None).build()?);
            Ok(Arc::new(ListArray::try_new(Arc::clone(item), lists.offsets().clone(), values, None)?))
        }
        (found, expected) if found == expected => Ok(Arc::clone(column)),
        (found, _) => Err(wrong(format!("it has type {found}"))),
    }
}
