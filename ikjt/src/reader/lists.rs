//! List columns: converts Parquet's levels to Arrow's lists in one pass.
//!
//! Parquet stores a list as ids with two small numbers each: the repetition level is 0 at the beginning of a list,
//! and the definition level says whether the list and the id are present (Melnik et al., Dremel, VLDB 2010). Arrow's
//! reader supports any nesting, and therefore builds validity bitmaps of ids and lists in several passes over the
//! levels, which took a fifth of the time to decode a folded row group. Here lists contain only ids, and ids are
//! never null.

use std::sync::Arc;

use arrow::array::{Int64Array, ListArray};
use arrow::buffer::{NullBuffer, OffsetBuffer};
use arrow::datatypes::{DataType, Field};
use onefold_storage::Ranges;
use parquet::column::reader::{get_column_reader, get_typed_column_reader};
use parquet::data_type::Int64Type;
use parquet::file::metadata::RowGroupMetaData;
use parquet::file::serialized_reader::SerializedPageReader;

/// Reads the lists of the leaf column `leaf` of a row group. `field` is the column's Arrow field.
///
/// # Errors
///
/// A message about invalid bytes or an unsupported field.
pub(super) fn read_lists(
    ranges: &Arc<Ranges>,
    row_group: &RowGroupMetaData,
    leaf: usize,
    field: &Field,
) -> Result<ListArray, String> {
    let rows = row_group.num_rows();
    let rows = usize::try_from(rows).map_err(|_| format!("{rows} rows"))?;
    let column = row_group.column(leaf);
    let DataType::List(item) = field.data_type() else {
        return Err(format!("it is a column of {}", field.data_type()));
    };
    // There is one definition level for lists that are not null (if lists may be null), and one for ids.
    let full = i16::from(field.is_nullable()) + 1;
    let descriptor = column.column_descr_ptr();
    let levels = (descriptor.max_def_level(), descriptor.max_rep_level());
    if item.data_type() != &DataType::Int64 || item.is_nullable() || levels != (full, 1) {
        return Err(format!("it is a column of {}", field.data_type()));
    }
    let text = |error: parquet::errors::ParquetError| error.to_string();
    let pages = SerializedPageReader::new(Arc::clone(ranges), column, rows, None).map_err(text)?;
    let mut reader = get_typed_column_reader::<Int64Type>(get_column_reader(descriptor, Box::new(pages)));
    let (mut definition, mut repetition, mut ids) = (Vec::new(), Vec::new(), Vec::new());
    let mut read = 0;
    while read < rows {
        let (definition, repetition) = (Some(&mut definition), Some(&mut repetition));
        let (lists, _, _) =
            reader.read_records(rows - read, definition, repetition, &mut ids).map_err(text)?;
        if lists == 0 {
            break;
        }
        read += lists;
    }
    let lists = Lists::new(&definition, &repetition, full, rows)?;
    if lists.offsets.last().map(|ids| *ids as usize) != Some(ids.len()) {
        return Err(format!("{} ids decoded for levels of others", ids.len()));
    }
    let nulls = field.is_nullable().then(|| NullBuffer::from(lists.present));
    let nulls = nulls.filter(|nulls| nulls.null_count() > 0);
    let (offsets, ids) = (OffsetBuffer::new(lists.offsets.into()), Int64Array::new(ids.into(), None));
    ListArray::try_new(Arc::clone(item), offsets, Arc::new(ids), nulls).map_err(|error| error.to_string())
}

/// The structure of lists, decoded from levels.
#[derive(Debug, PartialEq)]
struct Lists {
    /// The index of each list's first id, followed by the number of ids, `[rows + 1]`.
    offsets: Vec<i32>,
    /// Whether each list is not null, `[rows]`.
    present: Vec<bool>,
}

impl Lists {
    /// Decodes levels. `full` is the definition level of an id. If lists may be null, an empty list has definition
    /// level 1; otherwise no list is null.
    fn new(definition: &[i16], repetition: &[i16], full: i16, rows: usize) -> Result<Self, String> {
        i32::try_from(definition.len()).map_err(|_| format!("{} levels", definition.len()))?;
        let levels = || definition.iter().zip(repetition);
        // Branch-free like the loop below, because the ends of lists are not predictable.
        let are_ids =
            levels().fold(true, |are, (defined, repeated)| are & ((*repeated == 0) | (*defined == full)));
        if definition.len() != repetition.len()
            || repetition.first().is_some_and(|level| *level != 0)
            || !are_ids
        {
            return Err("its levels are not those of lists of ids".to_owned());
        }
        let begun = repetition.iter().filter(|level| **level == 0).count();
        if begun != rows {
            return Err(format!("{begun} lists decoded of {rows}"));
        }
        // A level that does not begin a list writes to the place of the next list, which that list overwrites.
        let (mut offsets, mut present) = (vec![0; rows + 1], vec![false; rows + 1]);
        let (mut list, mut ids) = (0, 0);
        for (&defined, &repeated) in levels() {
            offsets[list] = ids;
            present[list] = defined > 0;
            list += usize::from(repeated == 0);
            ids += i32::from(defined == full);
        }
        offsets[rows] = ids;
        present.truncate(rows);
        Ok(Self { offsets, present })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the definition and repetition levels of lists with the given numbers of ids; `None` is a null list.
    fn levels(lists: &[Option<usize>], is_nullable: bool) -> (Vec<i16>, Vec<i16>) {
        let (mut definition, mut repetition) = (Vec::new(), Vec::new());
        for list in lists {
            let empty = i16::from(is_nullable);
            match list {
                None => definition.push(0),
                Some(0) => definition.push(empty),
                Some(ids) => definition.extend(vec![empty + 1; *ids]),
            }
            repetition.push(0);
            repetition.resize(definition.len(), 1);
        }
        (definition, repetition)
    }

    proptest! {
        #[test]
        fn lists_are_decoded_from_their_levels(
            lists in prop::collection::vec(prop::option::of(0_usize..5), 0..20), is_nullable: bool,
        ) {
            let lists: Vec<_> =
                lists.into_iter().map(|list| if is_nullable { list } else { list.or(Some(0)) }).collect();
            let (definition, repetition) = levels(&lists, is_nullable);
            let found = Lists::new(&definition, &repetition, 1 + i16::from(is_nullable), lists.len()).unwrap();
            let sizes: Vec<_> = found.offsets.windows(2).map(|pair| (pair[1] - pair[0]) as usize).collect();
            prop_assert_eq!(sizes, lists.iter().map(|list| list.unwrap_or(0)).collect::<Vec<_>>());
            if is_nullable {
                prop_assert_eq!(found.present, lists.iter().map(Option::is_some).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn levels_of_other_types_are_refused() {
        let refused = |definition: &[i16], repetition: &[i16], rows| {
            Lists::new(definition, repetition, 2, rows).unwrap_err()
        };
        let wrong = "its levels are not those of lists of ids";
        assert_eq!(refused(&[2, 2], &[1, 1], 1), wrong);
        assert_eq!(refused(&[2, 1], &[0, 1], 1), wrong);
        assert_eq!(refused(&[1, 2], &[0, 1, 0], 2), wrong);
        assert_eq!(refused(&[2, 2], &[0, 1], 2), "1 lists decoded of 2");
    }
}
