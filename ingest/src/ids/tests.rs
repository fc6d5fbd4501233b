//! Tests every type of ids, single and in lists of every kind, hashed and numbered, and the SQL functions.

use std::sync::Arc;

use datafusion::arrow::array::{
    Array, ArrayRef, AsArray, BooleanArray, FixedSizeBinaryArray, Int64Array, ListArray, ListBuilder,
    StringArray, StringBuilder, UInt32Array, UInt64Array,
};
use datafusion::arrow::compute::cast;
use datafusion::arrow::datatypes::{DataType, Field, Int64Type};
use datafusion::arrow::util::pretty::pretty_format_batches;
use datafusion::prelude::SessionContext;
use onefold_datasets::{CountBudget, TextIds, hash_id};
use onefold_sql::Query as _;

use super::*;

/// Returns columns of every type with the values that correspond to the texts `17`, null, `3`, `17`.
fn numbers() -> Vec<ArrayRef> {
    let texts: ArrayRef = Arc::new(StringArray::from(vec![Some("17"), None, Some("3"), Some("17")]));
    let dictionary = |key, value| DataType::Dictionary(Box::new(key), Box::new(value));
    let types = [
        DataType::Utf8,
        DataType::LargeUtf8,
        DataType::Utf8View,
        dictionary(DataType::Int32, DataType::Utf8),
        dictionary(DataType::UInt8, DataType::LargeUtf8),
        DataType::Binary,
        DataType::LargeBinary,
        DataType::BinaryView,
        DataType::Int8,
        DataType::Int16,
        DataType::Int32,
        DataType::Int64,
        DataType::UInt8,
        DataType::UInt16,
        DataType::UInt32,
        DataType::UInt64,
        dictionary(DataType::Int8, DataType::Int64),
    ];
    types.iter().map(|data_type| cast(&texts, data_type).unwrap()).collect()
}

/// Returns columns with their texts.
fn columns() -> Vec<(ArrayRef, [Option<&'static str>; 4])> {
    let texts = [Some("17"), None, Some("3"), Some("17")];
    let mut all: Vec<_> = numbers().into_iter().map(|column| (column, texts)).collect();
    let booleans = BooleanArray::from(vec![Some(true), None, Some(false), Some(true)]);
    all.push((Arc::new(booleans), [Some("true"), None, Some("false"), Some("true")]));
    let large = UInt64Array::from(vec![Some(u64::MAX), None, Some(0), Some(1 << 63)]);
    let texts = [Some("18446744073709551615"), None, Some("0"), Some("9223372036854775808")];
    all.push((Arc::new(large), texts));
    let negative = Int64Array::from(vec![Some(i64::MIN), Some(-1), None, Some(i64::MAX)]);
    let texts = [Some("-9223372036854775808"), Some("-1"), None, Some("9223372036854775807")];
    all.push((Arc::new(negative), texts));
    let fixed = [Some("ab"), None, Some("zy"), Some("ab")];
    let bytes = fixed.iter().map(|text| text.map(str::as_bytes));
    all.push((Arc::new(FixedSizeBinaryArray::try_from_sparse_iter_with_size(bytes, 2).unwrap()), fixed));
    all
}

/// Returns the ids of a column as their texts.
fn undone(ids: &Int64Array, texts: &TextIds) -> Vec<Option<String>> {
    let texts = texts.lock();
    ids.iter().map(|id| id.map(|id| texts.text(id).unwrap().to_owned())).collect()
}

fn owned(texts: &[Option<&str>]) -> Vec<Option<String>> {
    texts.iter().map(|text| text.map(str::to_owned)).collect()
}

#[test]
fn single_ids_of_every_type_are_hashed_or_numbered() {
    for (column, texts) in columns() {
        let data_type = column.data_type().clone();
        assert!(IdType::of(&data_type).is_some(), "{data_type}");
        let hashed = scalar_ids("x", &column, &IdForm::Hashes).unwrap();
        let expected = texts.map(|text| text.map(|text| hash_id(text.as_bytes())));
        assert_eq!(hashed.iter().collect::<Vec<_>>(), expected, "{data_type}");
        assert!(hashed.iter().flatten().all(|id| id >= 0));
        let interned = Arc::new(TextIds::new("x", &CountBudget::new(1 << 20)));
        let ids = scalar_ids("x", &column, &IdForm::Texts(Arc::clone(&interned))).unwrap();
        assert_eq!(undone(&ids, &interned), owned(&texts), "{data_type}");
    }
}

#[test]
fn integers_and_booleans_stay_as_they_are() {
    for (column, texts) in columns() {
        let data_type = column.data_type();
        let stays = scalar_ids("x", &column, &IdForm::Integers);
        let values = |values: &[Option<&str>]| -> Vec<Option<i64>> {
            values.iter().map(|text| text.map(|text| text.parse().unwrap())).collect()
        };
        match IdType::of(data_type).unwrap() {
            IdType::Integer => {
                assert_eq!(stays.unwrap().iter().collect::<Vec<_>>(), values(&texts), "{data_type}");
            }
            IdType::Unsigned if texts[0] == Some("17") => {
                assert_eq!(stays.unwrap().iter().collect::<Vec<_>>(), values(&texts), "{data_type}");
            }
            IdType::Unsigned => {
                let error = stays.unwrap_err().to_string();
                assert!(error.contains("18446744073709551615 does not fit into 63 bits"), "{error}");
            }
            IdType::Boolean => {
                let values = [Some(1), None, Some(0), Some(1)];
                assert_eq!(stays.unwrap().iter().collect::<Vec<_>>(), values);
            }
            IdType::Text | IdType::Binary => assert!(stays.is_err(), "{data_type}"),
        }
    }
}

#[test]
fn lists_of_every_kind_and_type_are_hashed_or_numbered() {
    for (column, texts) in columns() {
        let present =
            |ids: &[usize]| -> Vec<String> { ids.iter().map(|i| texts[*i].unwrap().to_owned()).collect() };
        let rows: Vec<usize> = (0..4).filter(|i| texts[*i].is_some()).collect();
        let (a, b, c) = (rows[0], rows[1], rows[2]);
        let order = [a, b, c, a, b].map(|i| i as u32);
        let taken =
            datafusion::arrow::compute::take(&column, &UInt32Array::from(order.to_vec()), None).unwrap();
        let item = Arc::new(Field::new("item", column.data_type().clone(), true));
        let nulls = Some(vec![true, false, true].into());
        let offsets = datafusion::arrow::buffer::OffsetBuffer::from_lengths([2, 1, 2]);
        let lists: ArrayRef = Arc::new(ListArray::new(Arc::clone(&item), offsets, taken, nulls));
        let expected = [Some(present(&[a, b])), None, Some(present(&[a, b]))];
        let kinds = [
            DataType::List(Arc::clone(&item)),
            DataType::LargeList(Arc::clone(&item)),
            DataType::ListView(Arc::clone(&item)),
            DataType::LargeListView(Arc::clone(&item)),
        ];
        for kind in kinds {
            check_lists(&cast(&lists, &kind).unwrap(), &expected);
            let empty = cast(&lists.slice(0, 0), &kind).unwrap();
            check_lists(&empty, &[]);
            check_lists(&cast(&lists, &kind).unwrap().slice(1, 2), &expected[1..]);
        }
        // Lists of equal length; the second one is null.
        let pairs = [a, b, c, c, a, b].map(|i| i as u32);
        let items =
            datafusion::arrow::compute::take(&column, &UInt32Array::from(pairs.to_vec()), None).unwrap();
        let nulls = Some(vec![true, false, true].into());
        let fixed = datafusion::arrow::array::FixedSizeListArray::new(item, 2, items, nulls);
        check_lists(&(Arc::new(fixed) as ArrayRef), &expected);
    }
}

fn check_lists(lists: &ArrayRef, expected: &[Option<Vec<String>>]) {
    let data_type = lists.data_type();
    assert!(IdType::of_items(data_type).is_some(), "{data_type}");
    let rows = |ids: &ListArray| -> Vec<Option<Vec<i64>>> {
        ids.iter().map(|list| list.map(|list| list.as_primitive::<Int64Type>().values().to_vec())).collect()
    };
    let hash = |texts: &Vec<String>| texts.iter().map(|text| hash_id(text.as_bytes())).collect();
    let hashed: Vec<Option<Vec<i64>>> = expected.iter().map(|list| list.as_ref().map(hash)).collect();
    assert_eq!(rows(&list_ids("x", lists, &IdForm::Hashes).unwrap()), hashed, "{data_type}");
    let interned = Arc::new(TextIds::new("x", &CountBudget::new(1 << 20)));
    let ids = rows(&list_ids("x", lists, &IdForm::Texts(Arc::clone(&interned))).unwrap());
    let texts = interned.lock();
    let text = |ids: Vec<i64>| ids.iter().map(|id| texts.text(*id).unwrap().to_owned()).collect();
    assert_eq!(ids.into_iter().map(|list| list.map(text)).collect::<Vec<_>>(), expected, "{data_type}");
}

#[test]
fn nulls_in_lists_stay_null() {
    let mut lists = ListBuilder::new(StringBuilder::new());
    lists.append_value([Some("a"), None]);
    let lists: ArrayRef = Arc::new(lists.finish());
    let ids = list_ids("x", &lists, &IdForm::Hashes).unwrap();
    assert_eq!((ids.len(), ids.values().len(), ids.values().null_count()), (1, 2, 1));
}

#[test]
fn bytes_that_are_not_a_text_are_hashed_but_not_numbered() {
    let bytes: ArrayRef = Arc::new(FixedSizeBinaryArray::try_from_iter([[0xff, 0x00]].iter()).unwrap());
    let hashed = scalar_ids("uuid", &bytes, &IdForm::Hashes).unwrap();
    assert_eq!(hashed.value(0), 794_437_103_675_513_319);
    let texts = IdForm::Texts(Arc::new(TextIds::new("uuid", &CountBudget::new(1 << 20))));
    let error = scalar_ids("uuid", &bytes, &texts).unwrap_err().to_string();
    assert!(error.contains("column `uuid`: the bytes `\\xff\\x00` are not a UTF-8 text"), "{error}");
    assert!(error.contains("`encode(uuid, 'hex')`"), "{error}");
}

#[test]
fn functions_of_timelines_are_sent_with_their_form() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let hashes = [hash_id(b"N17"), hash_id(b"\xc3\x85")];
    for (form, is_text) in [(IdForm::Hashes, false), (IdForm::TextHashes, true)] {
        let sent = functions::write_timeline_function(&timeline_function(3, 1, "item", form)).unwrap();
        let context = SessionContext::new();
        context.register_udf(functions::read_timeline_function(&sent.unwrap()).unwrap());
        let sql = "SELECT __onefold_ids3_1(column1) FROM (VALUES ('N17'), (NULL), ('Å'))";
        let rows = runtime.block_on(async { context.query(sql).await.unwrap().collect().await.unwrap() });
        let ids = rows[0].column(0).as_primitive::<Int64Type>();
        assert_eq!(ids.iter().collect::<Vec<_>>(), [Some(hashes[0]), None, Some(hashes[1])]);
        let sql = "SELECT __onefold_ids3_1(arrow_cast(x'ff', 'Binary'))";
        let bytes = runtime.block_on(async { context.query(sql).await.unwrap().collect().await });
        if is_text {
            let error = bytes.unwrap_err().to_string();
            assert!(error.contains("column `item`: the bytes `\\xff` are not a UTF-8 text"), "{error}");
        } else {
            assert_eq!(bytes.unwrap()[0].column(0).as_primitive::<Int64Type>().value(0), hash_id(b"\xff"));
        }
    }
    let other = crate::session_ids::function();
    assert_eq!(functions::write_timeline_function(&other).unwrap(), None, "every machine has it");
    assert!(functions::read_timeline_function(b"{}").is_err());
}

/// Runs a query with the functions, and returns the result as text.
fn query(sql: &str) -> Result<String, String> {
    let context = SessionContext::new();
    functions::register(&context);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let rows = context.query(sql).await.map_err(|error| error.to_string())?;
        let rows = rows.collect().await.map_err(|error| error.to_string())?;
        let table = pretty_format_batches(&rows).unwrap().to_string();
        let cells = table.lines().skip(3).filter(|line| line.starts_with('|'));
        let cell = |line: &str| line.trim_matches('|').trim().to_owned();
        Ok(cells.map(cell).collect::<Vec<_>>().join("; "))
    })
}

#[test]
fn hash_id_hashes_ids_of_all_types_and_lists_of_them() {
    let hash = 2_471_101_067_911_095_003_i64.to_string();
    for value in ["'17'", "17", "arrow_cast(17, 'UInt64')", "arrow_cast('17', 'Dictionary(Int32, Utf8)')"] {
        assert_eq!(query(&format!("SELECT hash_id({value})")).unwrap(), hash, "{value}");
    }
    assert_eq!(query("SELECT hash_id(true)").unwrap(), "4664556114322093609");
    assert_eq!(query("SELECT hash_id(x) FROM (VALUES ('17'), (NULL)) t(x)").unwrap(), format!("{hash}; "));
    assert_eq!(query("SELECT hash_id(NULL)").unwrap(), "");
    assert_eq!(query("SELECT hash_id(['17', NULL])").unwrap(), format!("[{hash}, ]"));
    let split = "SELECT hash_id(split_ids(x, '|')) FROM (VALUES ('17|-17'), (''), (NULL)) t(x)";
    assert_eq!(query(split).unwrap(), format!("[{hash}, 745329282863897325]; []; "));
    let error = query("SELECT hash_id(1.5)").unwrap_err();
    assert!(error.contains("`hash_id` takes a text") && error.contains("Float64"), "{error}");
    assert!(query("SELECT hash_id(1, 2)").is_err());
}

#[test]
fn whole_id_takes_numbers_that_are_whole_and_exact() {
    for (number, id) in [
        ("7.0", "7"),
        ("-7.0", "-7"),
        ("9007199254740992.0", "9007199254740992"),
        ("arrow_cast(16777216, 'Float32')", "16777216"),
        ("9007199254740993", "9007199254740993"),
        ("NULL", ""),
        ("[7.0, NULL, 8.0]", "[7, , 8]"),
    ] {
        assert_eq!(query(&format!("SELECT whole_id({number})")).unwrap(), id, "{number}");
    }
    for number in [
        "1.5",
        "9007199254740994.0",
        "arrow_cast(16777218, 'Float32')",
        "'NaN'::double",
        "'inf'::double",
        "[7.5]",
        "arrow_cast('18446744073709551615', 'UInt64')",
    ] {
        assert!(query(&format!("SELECT whole_id({number})")).is_err(), "{number}");
    }
    assert!(query("SELECT whole_id('7')").unwrap_err().contains("takes a number or a list of numbers"));
}

#[test]
fn split_ids_gives_trimmed_ids_and_no_empty_ones() {
    let split =
        |text: &str, separator: &str| query(&format!("SELECT split_ids({text}, {separator})")).unwrap();
    assert_eq!(split("'a|b|c'", "'|'"), "[a, b, c]");
    assert_eq!(split("' a | |b||'", "'|'"), "[a, b]");
    assert_eq!(split("'N1 N2\tN3'", "' '"), "[N1, N2\tN3]");
    assert_eq!(split("''", "'|'"), "[]");
    assert_eq!(split("' '", "'|'"), "[]");
    assert_eq!(split("NULL", "'|'"), "");
    assert_eq!(split("'a, b::c'", "', '"), "[a, b::c]");
    let column = "SELECT split_ids(x, s) FROM (VALUES ('a-b', '-'), ('a b', NULL), ('', ' ')) t(x, s)";
    assert_eq!(query(column).unwrap(), "[a, b]; ; []");
    assert!(
        query("SELECT split_ids('a', '')").unwrap_err().contains("the separator of `split_ids` is empty")
    );
    assert!(
        query("SELECT split_ids(17, '|')").unwrap_err().contains("takes a text and a separator, not Int64")
    );
}

#[test]
fn split_part_each_takes_labels_from_ids() {
    let pairs = "split_ids('N123-1 N4-56-0', ' ')";
    let part = |n: i64| query(&format!("SELECT split_part_each({pairs}, '-', {n})")).unwrap();
    assert_eq!(part(1), "[N123, N4]");
    assert_eq!(part(-1), "[1, 0]");
    assert_eq!(part(3), "[, 0]");
    let labels = format!("SELECT CAST(split_part_each({pairs}, '-', -1) AS INT[])");
    assert_eq!(query(&labels).unwrap(), "[1, 0]");
    let column =
        "SELECT split_part_each(split_ids(x, ' '), '-', 1) FROM (VALUES ('a-1 b-0'), (''), (NULL)) t(x)";
    assert_eq!(query(column).unwrap(), "[a, b]; []; ");
    assert!(
        query(&format!("SELECT split_part_each({pairs}, '-', 0)")).unwrap_err().contains("counted from 1")
    );
    assert!(query("SELECT split_part_each('a', '-', 1)").unwrap_err().contains("takes a list of texts"));
    // One sample for each pair, with SQL's own functions.
    let rows = "SELECT concat(split_part(shown, '-', 1), ' ', split_part(shown, '-', 2)) FROM \
                (SELECT unnest(split_ids('N1-1 N2-0', ' ')) AS shown)";
    assert_eq!(query(rows).unwrap(), "N1 1; N2 0");
}
