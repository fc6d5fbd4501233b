//! Tests each format, each compression and each way to name files, and files that do not fit together.

use std::sync::Arc;

use arrow::array::{ArrayRef, StringArray};

use crate::logs::{
    Dir, ROWS, SELECT, SELECT_TEXT, SELECT_TWO, columns, compressed, csv, expected, int32, json_lines,
    parquet, rows, with,
};

/// The types that CSV and JSON do not have.
const TIME: &str = "schema = { time = \"TIMESTAMP\" }";

#[test]
fn every_format_and_compression_gives_the_same_dataset() {
    let expected = expected();
    let dir = Dir::new();
    let rows = rows();
    let (early, late) = rows.split_at(13);
    for format in ["csv", "tsv", "json"] {
        for ending in ["", "gz", "bz2", "xz", "zst"] {
            let name = format!("{format}{ending}");
            for (part, rows) in [early, late].into_iter().enumerate() {
                let text = match format {
                    "csv" => csv(rows, ',', true),
                    "tsv" => csv(rows, '\t', true),
                    _ => json_lines(rows),
                };
                match ending {
                    "" => dir.write(format!("{name}/part-{part}.{format}"), text),
                    _ => dir.write(format!("{name}/part-{part}.{format}.{ending}"), compressed(text, ending)),
                }
            }
            dir.configure(
                &format!("[sources]\nlog = {{ path = \"{name}/part-*\", {TIME} }}"),
                if format == "json" { SELECT } else { SELECT_TEXT },
            );
            let (summary, files) = dir.build(&format!("dataset-{name}"));
            assert!(files == expected, "{name} differs");
            assert!(summary["source_rows"].is_null());
            assert!(summary["source_bytes"].as_u64().unwrap() > 500, "{summary}");
        }
    }
}

/// The feature `delta` has tests of its own.
#[cfg(not(feature = "delta"))]
#[test]
fn a_program_without_the_feature_refuses_tables() {
    let dir = Dir::new();
    dir.write("table/_delta_log/00000000000000000000.json", "{}");
    dir.write("table/a.parquet", parquet(columns(&rows())));
    dir.configure("[sources]\nlog = { delta = \"table\", version = 0 }", SELECT);
    dir.fails(&["source `log`", "without the feature `delta`", "the wheel `onefold`"]);
    dir.configure("[sources]\nlog = \"table\"", SELECT);
    dir.fails(&["source `log`", "it is a Delta Lake table", "{ delta = \"table\" }"]);
}

#[test]
fn the_configuration_sets_what_file_names_do_not_show() {
    let expected = expected();
    let dir = Dir::new();
    let rows = rows();
    dir.write("log.0", compressed(csv(&rows, ';', false), "zst"));
    dir.configure("[sources]\nlog = \"log.0\"", SELECT_TEXT);
    dir.fails(&["source `log`", "log.0", "its name does not say its format", "set the source's `format`"]);
    let keys = "path = \"log.0\", format = \"csv\", delimiter = \";\", header = false";
    dir.configure(&format!("[sources]\nlog = {{ {keys} }}"), SELECT_TEXT);
    dir.fails(&["log.0", "it is compressed with zstd", "`compression`"]);
    let types = "schema = { request = \"BIGINT\", user = \"BIGINT\", time = \"TIMESTAMP\", age = \"DOUBLE\", \
                 page = \"VARCHAR\", history = \"VARCHAR\", clicked = \"BOOLEAN\" }";
    let zstd = "compression = \"zstd\"";
    dir.configure(&format!("[sources]\nlog = {{ {keys}, {zstd}, {types} }}"), SELECT_TEXT);
    assert!(dir.build("dataset").1 == expected);
    let fewer = types.replace(", clicked = \"BOOLEAN\"", "");
    dir.configure(&format!("[sources]\nlog = {{ {keys}, {zstd}, {fewer} }}"), SELECT_TEXT);
    dir.fails(&["log.0", "7 columns without a header, and `schema` has 6"]);
    // A Parquet file needs no ending in its name.
    dir.write("part-0", parquet(columns(&rows)));
    dir.configure("[sources]\nlog = \"part-0\"", SELECT);
    assert!(dir.build("dataset-parquet").1 == expected);
}

#[test]
fn folders_patterns_and_lists_of_files_are_one_table() {
    let expected = expected();
    let dir = Dir::new();
    for (part, rows) in rows().chunks(10).enumerate() {
        dir.write(format!("log/day={}/hour={part}/a.parquet", part / 2), parquet(columns(rows)));
        dir.write(format!("log/day={}/hour={part}/_SUCCESS", part / 2), "");
        dir.write(format!("log/day={}/.hour={part}.crc", part / 2), "x");
    }
    let paths = [
        "\"log\"",
        "\"log/\"",
        "\"log/day=*/\"",
        "\"log/**/*.parquet\"",
        "\"log/day=?/hour=*/a.par*\"",
        "[\"log/day=1\", \"log/day=0/*/a.parquet\", \"log/day=0\"]",
    ];
    for (case, path) in paths.iter().enumerate() {
        dir.configure(&format!("[sources]\nlog = {{ path = {path} }}"), SELECT);
        let (summary, files) = dir.build(&format!("dataset-{case}"));
        assert!(files == expected, "{path}");
        assert_eq!(summary["source_rows"], ROWS);
    }
    // Folders become columns: text, or the type in the configuration.
    dir.configure("[sources]\nlog = \"log\"", &format!("{SELECT} WHERE day = '1' AND hour IN ('2', '3')"));
    assert_eq!(dir.build("dataset-text").0["samples"], 20);
    let typed = "[sources]\nlog = { path = \"log\", partition_columns = { hour = \"INT\" } }";
    dir.configure(typed, &format!("{SELECT} WHERE hour + 1 > 3"));
    assert_eq!(dir.build("dataset-typed").0["samples"], 10);
    // Files in folders that the query does not select are not opened, so the damaged pages of this one do not matter.
    let mut holed = parquet(columns(&rows()));
    holed[4..200].fill(0xff);
    dir.write("log/day=7/hour=7/a.parquet", holed);
    dir.configure("[sources]\nlog = \"log\"", &format!("{SELECT} WHERE day < '7' AND hour <> '3'"));
    assert_eq!(dir.build("dataset-pruned").0["samples"], 30);
    dir.configure("[sources]\nlog = \"log\"", &format!("{SELECT} WHERE day = '8'"));
    dir.fails(&["gives no samples"]);
    fs_err::remove_file(dir.path("log/day=7/hour=7/a.parquet")).unwrap();
    dir.write("log/day=1/hour=x/a.parquet", parquet(columns(&rows())));
    dir.configure(typed, SELECT);
    dir.fails(&["hour=x/a.parquet", "the value of its folder `hour=x` cannot be read as Int32"]);
    dir.configure("[sources]\nlog = { path = \"log\", partition_columns = { hours = \"INT\" } }", SELECT);
    dir.fails(&["no folder `hours=…`", "did you mean `hour`?"]);
    dir.write("log/day=2/a.parquet", parquet(columns(&rows())));
    dir.configure("[sources]\nlog = \"log\"", SELECT);
    dir.fails(&["day=2/a.parquet", "its folders make other columns", "`day=`, `hour=`"]);
}

#[test]
fn columns_are_found_by_name_and_widened() {
    let expected = expected();
    let dir = Dir::new();
    let rows = rows();
    let (early, late) = rows.split_at(20);
    let narrow = [
        ("user", int32(early.iter().map(|row| row.user))),
        ("request", int32(early.iter().map(|row| row.request))),
    ];
    let mut first = with(columns(early), &narrow);
    first.reverse();
    dir.write("parquet/a.parquet", parquet(first));
    dir.write("parquet/b.parquet", parquet(columns(late)));
    dir.configure("[sources]\nlog = \"parquet\"", SELECT);
    assert!(dir.build("dataset-parquet").1 == expected);

    // CSV columns in another order, and a column that only one file has.
    dir.write("csv/a.csv", csv(early, ',', true));
    let swapped = |line: &str| {
        let (request, rest) = line.split_once(',').unwrap();
        let (user, rest) = rest.split_once(',').unwrap();
        format!("{user},extra,{request},{rest}")
    };
    let plain: Vec<_> = late
        .iter()
        .map(|row| crate::logs::Row { page: row.page.replace('\n', " "), ..row.clone() })
        .collect();
    let text: String = csv(&plain, ',', true).lines().map(|line| swapped(line) + "\n").collect();
    dir.write("csv/b.csv", text);
    // A column must be in every file only if it is used.
    dir.configure(&format!("[sources]\nlog = {{ path = \"csv\", {TIME} }}"), SELECT_TEXT);
    assert!(dir.build("dataset-without").1 == expected);
    dir.configure(
        &format!("[sources]\nlog = {{ path = \"csv\", {TIME} }}"),
        &format!("{SELECT_TEXT} WHERE extra = 'extra'"),
    );
    dir.fails(&["csv/a.csv", "the column `extra` is missing", "csv/b.csv", "missing_columns = \"null\""]);
    dir.configure(
        &format!("[sources]\nlog = {{ path = \"csv\", {TIME}, missing_columns = \"null\" }}"),
        SELECT_TEXT,
    );
    assert!(dir.build("dataset-csv").1 == expected);
    let counted = format!("{SELECT_TEXT} WHERE extra = 'extra'");
    dir.configure(
        &format!("[sources]\nlog = {{ path = \"csv\", {TIME}, missing_columns = \"null\" }}"),
        &counted,
    );
    assert_eq!(dir.build("dataset-extra").0["samples"], 20);
}

#[test]
fn files_with_conflicting_columns_are_named() {
    let dir = Dir::new();
    let rows = rows();
    let whole = parquet(columns(&rows));
    let texts: ArrayRef = Arc::new(StringArray::from(vec!["x"; rows.len()]));
    let mut fewer = columns(&rows);
    fewer.retain(|(name, _)| *name != "age");
    let cases: &[(&str, Vec<u8>, &[&str])] = &[
        ("parquet", whole[..whole.len() / 2].to_vec(), &["not a whole Parquet file", "write it again"]),
        ("parquet", vec![], &["not a whole Parquet file", "write it again"]),
        ("parquet", csv(&rows, ',', true).into_bytes(), &["not a whole Parquet file", "another format"]),
        ("parquet", parquet(fewer), &["the column `age` is missing", "b.parquet", "missing_columns"]),
        (
            "parquet",
            parquet(with(columns(&rows), &[("age", texts)])),
            &["the column `age` is Float64 here and Utf8 in", "CAST"],
        ),
        ("csv", vec![], &["the file is empty"]),
        ("csv", whole.clone(), &["it is a Parquet file", "`format`"]),
        ("csv", json_lines(&rows).into_bytes(), &["it looks like JSON lines"]),
        ("csv", compressed(csv(&rows, ',', true), "gz"), &["it is compressed with gzip", "`compression`"]),
        ("csv", b"a,b\n1\n".to_vec(), &["line 2: the row has 1 value", "`ragged = \"skip\"`"]),
        ("json", vec![], &["the file is empty"]),
        ("json", csv(&rows, ',', true).into_bytes(), &["it is not JSON lines: line 1"]),
        ("json", b"[\n{\"request\": 1}]".to_vec(), &["a JSON array, not JSON lines"]),
    ];
    for (case, (format, bytes, parts)) in cases.iter().enumerate() {
        let folder = format!("case-{case}");
        dir.write(format!("{folder}/a.{format}"), bytes);
        let good = match *format {
            "parquet" => whole.clone(),
            "csv" => csv(&rows, ',', true).into_bytes(),
            _ => json_lines(&rows).into_bytes(),
        };
        dir.write(format!("{folder}/b.{format}"), good);
        dir.configure(&format!("[sources]\nlog = \"{folder}/*\""), SELECT);
        // The message about types names the later file; all others name the wrong one.
        let file = if parts[0].contains("Utf8 in") { "b.parquet`: " } else { "a." };
        dir.fails(&[&["source `log`", file][..], parts].concat());
    }
    dir.write("mixed/a.parquet", &whole);
    dir.write("mixed/b.csv", csv(&rows, ',', true));
    dir.configure("[sources]\nlog = \"mixed\"", SELECT);
    dir.fails(&["mixed/b.csv", "its format is Csv", "a.parquet` is Parquet", "UNION ALL"]);
    dir.configure("[sources]\nlog = { path = \"mixed/a.parquet\", schema = { age = \"REAL\" } }", SELECT);
    dir.fails(&["mixed/a.parquet", "a Parquet file has its own types", "CAST"]);
    dir.configure("[sources]\nlog = { path = \"mixed/b.csv\", schema = { history = \"BIGINT[]\" } }", SELECT);
    dir.fails(&["mixed/b.csv", "`history` a list, which CSV does not have", "string_to_array(history"]);
    dir.configure("[sources]\nlog = \"nowhere/*.csv\"", SELECT);
    dir.fails(&["source `log`", "nowhere/*.csv", "there is no such file"]);
    fs_err::create_dir(dir.path("empty")).unwrap();
    dir.configure("[sources]\nlog = \"empty\"", SELECT);
    dir.fails(&["source `log`", "empty`: the folder has no files"]);
    dir.write("log.parquet.gz", compressed(&whole, "gz"));
    dir.configure("[sources]\nlog = \"log.parquet.gz\"", SELECT);
    dir.fails(&["log.parquet.gz", "not read from within another compression", "unpack"]);
}

#[test]
fn rows_that_do_not_fit_name_their_file_and_line() {
    let dir = Dir::new();
    let many: String =
        (0..3000).map(|row| format!("{row},{}\n", if row == 2500 { "x" } else { "1" })).collect();
    dir.write("log/a.csv", "request,user\n1,2\n");
    dir.write("log/b.csv", format!("request,user\n{many}"));
    dir.configure("[sources]\nlog = \"log\"", &SELECT_TWO.replace("{user}", "user"));
    dir.fails(&[
        "source `log`",
        "b.csv",
        "column `user`: 1 rows have a value that does not fit the type of the first rows, Int64",
        "the first is `x` in line 2502 of",
        "`[sources].log`, as `schema = { user = \"VARCHAR\" }`",
    ]);
    // A declared type accepts the values, and the query must convert them.
    dir.configure(
        "[sources]\nlog = { path = \"log\", schema = { user = \"VARCHAR\" } }",
        &SELECT_TWO.replace("{user}", "char_length(user)"),
    );
    assert_eq!(dir.build("dataset").0["samples"], 3001);
    dir.write("more/a.csv", format!("request,user\n{}1,2,3\n", many.replace('x', "1")));
    dir.configure("[sources]\nlog = \"more\"", &SELECT_TWO.replace("{user}", "user"));
    dir.fails(&["source `log`", "more/a.csv", "line 3002: the row has 3 values", "`ragged = \"skip\"`"]);

    let rows = rows();
    let lines = json_lines(&rows).repeat(40) + "{\"request\": \"not a number\"}\n";
    dir.write("json/a.json.gz", compressed(&lines, "gz"));
    dir.configure(&format!("[sources]\nlog = {{ path = \"json\", {TIME} }}"), SELECT);
    dir.fails(&[
        "source `log`",
        "json/a.json.gz",
        "the first is `not a number` in line 1601 of",
        "schema = {",
    ]);
    for ending in ["gz", "bz2", "xz", "zst"] {
        // The remaining bytes suffice to infer the columns.
        let packed = compressed(json_lines(&rows).repeat(100), ending);
        dir.write(format!("cut-{ending}/a.json.{ending}"), &packed[..packed.len() - 5]);
        dir.configure(&format!("[sources]\nlog = {{ path = \"cut-{ending}\", {TIME} }}"), SELECT);
        dir.fails(&["source `log`", &format!("a.json.{ending}"), "it cannot be", "write it again"]);
    }
    // The pages are damaged, but the footer is intact.
    let mut holed = parquet(columns(&rows));
    holed[4..200].fill(0xff);
    dir.write("holed/a.parquet", parquet(columns(&rows)));
    dir.write("holed/b.parquet", holed);
    dir.configure("[sources]\nlog = \"holed\"", SELECT);
    dir.fails(&["source `log`", "holed/b.parquet", "it cannot be decoded", "write it again"]);
}

/// A query of the columns of [`SELECT_TWO`] from a text file with a title.
const TITLES: &str = "SELECT request, user, to_timestamp(1714521600 + request) AS time, 1 AS age, char_length(title) AS page, \
    [1] AS history, true AS clicked FROM log";

#[test]
fn quotes_that_are_text_swallow_no_rows() {
    let dir = Dir::new();
    // 3,000 rows, so that the quotes come after the rows from which types are inferred. A quote opens in row 2,900 and
    // closes before a tab in row 2,950. If quotes have a meaning, there are 51 fewer rows.
    let title = |row: i64| match row {
        2900 => "\"Great".to_owned(),
        2950 => "film\"".to_owned(),
        row => format!("film {row}"),
    };
    let line = |row: i64| format!("{row}\t{}\t{}\n", title(row), row / 7);
    let text: String = (0..3000).map(line).collect();
    dir.write("log/a.tsv", format!("request\ttitle\tuser\n{text}"));
    dir.configure("[sources]\nlog = \"log\"", TITLES);
    dir.fails(&["source `log`", "log/a.tsv", "lines 2902 to 2952", "51 rows", "quote = \"none\""]);
    dir.configure("[sources]\nlog = { path = \"log\", quote = \"none\" }", TITLES);
    assert_eq!(dir.build("dataset").0["samples"], 3000);
    // A quote that is never closed, and a quote that is followed by text.
    for (bad, message) in [
        ("5\t\"Great\t1\n", "line 3002: a quote opens a value here and is not closed"),
        ("5\t\"Great\" film\t1\n", "line 3002: a quote closes a value here, but more text follows"),
    ] {
        let plain: String = (0..3000).map(|row| format!("{row}\tfilm\t{}\n", row / 7)).collect();
        dir.write("log/a.tsv", format!("request\ttitle\tuser\n{plain}{bad}"));
        dir.configure("[sources]\nlog = \"log\"", TITLES);
        dir.fails(&["source `log`", "log/a.tsv", message, "quote = \"none\""]);
        dir.configure("[sources]\nlog = { path = \"log\", quote = \"none\" }", TITLES);
        let name = format!("dataset-{}", bad.len());
        assert_eq!(dir.build(&name).0["samples"], 3001);
    }
    // Other quote and escape characters.
    dir.write("log/a.tsv", "request\ttitle\tuser\n1\t'a\\'\tb'\t2\n");
    let options = "quote = \"'\", escape = \"\\\\\"";
    dir.configure(
        &format!("[sources]\nlog = {{ path = \"log\", {options} }}"),
        &format!("{TITLES} WHERE title = 'a''\tb'"),
    );
    assert_eq!(dir.build("dataset-escaped").0["samples"], 1);
}

#[test]
fn ragged_rows_are_refused_null_or_skipped() {
    let dir = Dir::new();
    let line = |row: i64| match row % 1000 {
        999 => format!("{row}\n"),
        _ => format!("{row},{},x\n", row / 7),
    };
    let text: String = (0..3000).map(line).collect();
    dir.write("log/a.csv", format!("request,user,title\n{text}"));
    dir.configure("[sources]\nlog = \"log\"", TITLES);
    dir.fails(&[
        "log/a.csv",
        "line 1001: the row has 1 value, but there are 3 columns",
        "`ragged = \"null\"`",
    ]);
    let query = TITLES
        .replace("user,", "COALESCE(user, 0) AS user,")
        .replace("char_length(title)", "COALESCE(char_length(title), 7)");
    dir.configure("[sources]\nlog = { path = \"log\", ragged = \"null\" }", &query);
    let (summary, _) = dir.build("dataset-null");
    assert_eq!((&summary["samples"], &summary["ragged_rows_skipped"]), (&3000.into(), &0.into()));
    dir.configure("[sources]\nlog = { path = \"log\", ragged = \"skip\" }", TITLES);
    let (summary, _) = dir.build("dataset-skip");
    assert_eq!((&summary["samples"], &summary["ragged_rows_skipped"]), (&2997.into(), &3.into()));
    dir.write("log/a.csv", format!("request,user,title\n{}1,2,x,y\n", text.replace("999\n", "999,1,x\n")));
    dir.configure("[sources]\nlog = { path = \"log\", ragged = \"null\" }", TITLES);
    dir.fails(&[
        "log/a.csv",
        "line 3002: the row has 4 values, but there are 3 columns",
        "`ragged = \"skip\"`",
    ]);
}

#[test]
fn line_ends_marks_and_empty_lines_make_no_difference() {
    let dir = Dir::new();
    let lines: Vec<String> = (0..30).map(|row| format!("{row},{},x", row / 7)).collect();
    let mut built = Vec::new();
    for (name, ending, mark) in
        [("lf", "\n", ""), ("crlf", "\r\n", "\u{feff}"), ("cr", "\r", ""), ("empty", "\n\n", "\u{feff}")]
    {
        dir.write(
            format!("{name}.csv"),
            format!("{mark}request,user,title{ending}{}{ending}", lines.join(ending)),
        );
        dir.configure(&format!("[sources]\nlog = \"{name}.csv\""), TITLES);
        let (summary, files) = dir.build(&format!("dataset-{name}"));
        assert_eq!(summary["samples"], 30, "{name}");
        built.push(files);
    }
    assert!(built.windows(2).all(|pair| pair[0] == pair[1]));
    // No option makes a line a comment.
    dir.write("comment.csv", "# by hand\nrequest,user,title\n1,2,x\n");
    dir.configure("[sources]\nlog = \"comment.csv\"", TITLES);
    dir.fails(&["comment.csv", "line 2: the row has 3 values, but there are 1 columns"]);
    dir.write("wide.csv", b"\xff\xfer\0e\0q\0");
    dir.configure("[sources]\nlog = \"wide.csv\"", TITLES);
    dir.fails(&["wide.csv", "UTF-16", "iconv"]);
}

/// Returns the bytes of a Parquet file whose pages have checksums. Arrow's writer writes none, so the pages are
/// rewritten.
fn with_checksums(values: &[i64], corrupt: bool) -> Vec<u8> {
    use parquet::basic::{Compression, Encoding};
    use parquet::file::properties::WriterProperties;

    let names = ["request", "user"];
    let columns =
        names.map(|name| (name, Arc::new(arrow::array::Int64Array::from(values.to_vec())) as ArrayRef));
    let batch = arrow::array::RecordBatch::try_from_iter(columns).unwrap();
    let properties = WriterProperties::builder()
        .set_compression(Compression::UNCOMPRESSED)
        .set_dictionary_enabled(false)
        .set_encoding(Encoding::PLAIN)
        .set_statistics_enabled(parquet::file::properties::EnabledStatistics::None)
        .set_offset_index_disabled(true)
        .build();
    let mut bytes = Vec::new();
    let mut writer =
        parquet::arrow::ArrowWriter::try_new(&mut bytes, batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    let metadata = writer.close().unwrap();
    let column = metadata.row_group(0).column(1);
    let start = column.data_page_offset() as usize;
    let end = start + column.compressed_size() as usize;
    let data = 8 * values.len();
    // The page header is a Thrift struct in the compact protocol. Its fields are the type, two sizes and the checksum
    // (the fourth field). The first three fields are kept, and a checksum field of six bytes is inserted after them.
    let header = bytes[start..end - data].to_vec();
    let varint = |at: usize| at + header[at..].iter().position(|byte| byte & 0x80 == 0).unwrap() + 1;
    let third = varint(varint(varint(1) + 1) + 1);
    // The difference between the field ids of the third field and the next one is 2.
    assert_eq!((header[0], header[third] >> 4), (0x15, 2), "{header:?}");
    let mut page = bytes[end - data..end].to_vec();
    let checksum = crc32(&page) as i32;
    let zigzag = ((checksum << 1) ^ (checksum >> 31)) as u32;
    let mut field = vec![0x15];
    let mut rest = zigzag;
    while rest >= 0x80 {
        field.push((rest & 0x7f) as u8 | 0x80);
        rest >>= 7;
    }
    field.push(rest as u8);
    if corrupt {
        // A changed value that can still be decoded.
        page[16] ^= 1;
    }
    let mut header = header;
    header[third] = 0x1c;
    header.splice(third..third, field.iter().copied());
    // The column chunk is the last one, so only its own size changes. The footer is rewritten with this size.
    let mut file = bytes[..start].to_vec();
    file.extend(header);
    file.extend(page);
    let grown = field.len() as i64;
    let chunk = column.clone().into_builder();
    let chunk = chunk.set_total_compressed_size(column.compressed_size() + grown);
    let chunk = chunk.set_total_uncompressed_size(column.uncompressed_size() + grown).build().unwrap();
    let group = metadata.row_group(0).clone();
    let columns = vec![group.column(0).clone(), chunk];
    let group = group.into_builder().set_column_metadata(columns).build().unwrap();
    let metadata = parquet::file::metadata::ParquetMetaDataBuilder::new(metadata.file_metadata().clone());
    let metadata = metadata.set_row_groups(vec![group]).build();
    let mut footer = Vec::new();
    parquet::file::metadata::ParquetMetaDataWriter::new(&mut footer, &metadata).finish().unwrap();
    file.extend(footer);
    file
}

/// Returns the CRC-32 of gzip and zlib (ISO 3309), which Parquet pages use.
fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
    !bytes.iter().fold(u32::MAX, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

#[test]
fn page_checksums_are_verified() {
    assert_eq!(crc32(b"123456789"), 0xcbf4_3926, "the check value of the CRC's catalogue");
    let dir = Dir::new();
    let values: Vec<i64> = (0..1000).collect();
    dir.write("sound.parquet", with_checksums(&values, false));
    dir.write("corrupt.parquet", with_checksums(&values, true));
    dir.configure("[sources]\nlog = \"sound.parquet\"", &SELECT_TWO.replace("{user}", "user"));
    assert_eq!(dir.build("dataset").0["samples"], 1000);
    dir.configure("[sources]\nlog = \"corrupt.parquet\"", &SELECT_TWO.replace("{user}", "user"));
    dir.fails(&["source `log`", "corrupt.parquet", "does not have the checksum", "write it again"]);
    let mut segments = dir.program("segments");
    let program = segments.get_program().to_owned();
    segments = std::process::Command::new(program);
    segments.args(["shard", "corrupt.parquet", "--by", "user", "--segments", "2", "--out", "segments"]);
    segments.current_dir(dir.path("")).env("RUST_BACKTRACE", "0");
    dir.fails_as(segments, &["corrupt.parquet", "it cannot be decoded", "does not have the checksum"]);
}

#[test]
fn a_file_url_is_a_local_path() {
    let dir = Dir::new();
    dir.write("log/a.csv", csv(&rows(), ',', true));
    dir.configure(
        &format!("[sources]\nlog = {{ path = \"file://{}/*.csv\", {TIME} }}", dir.path("log").display()),
        SELECT_TEXT,
    );
    assert!(dir.build("dataset").1 == expected());
    dir.configure("[sources]\nlog = \"file://elsewhere/a.csv\"", SELECT_TEXT);
    dir.fails(&["file://elsewhere/a.csv", "names no local path", "file:///"]);
}

/// The engine divides files of more than 10 MiB, if the format allows it.
#[test]
fn large_files_are_read_whole() {
    let dir = Dir::new();
    let rows = rows();
    dir.write("log.json", json_lines(&rows).repeat(2000));
    dir.configure(&format!("[sources]\nlog = {{ path = \"log.json\", {TIME} }}"), SELECT);
    assert_eq!(dir.build("dataset-json").0["samples"], 2000 * ROWS);
    let text = csv(&rows, ',', true);
    let (header, body) = text.split_once('\n').unwrap();
    dir.write("log.csv", format!("{header}\n{}", body.repeat(4000)));
    dir.configure(&format!("[sources]\nlog = {{ path = \"log.csv\", {TIME} }}"), SELECT_TEXT);
    assert_eq!(dir.build("dataset-csv").0["samples"], 4000 * ROWS);
    for file in ["log.json", "log.csv"] {
        assert!(fs_err::metadata(dir.path(file)).unwrap().len() > 10 << 20);
    }
}

#[test]
fn files_without_rows_are_no_mistake() {
    let dir = Dir::new();
    let expected = expected();
    let rows = rows();
    dir.write("csv/a.csv", csv(&[], ',', true));
    dir.write("csv/b.csv", csv(&rows, ',', true));
    dir.configure(&format!("[sources]\nlog = {{ path = \"csv\", {TIME} }}"), SELECT_TEXT);
    assert!(dir.build("dataset-csv").1 == expected);
    dir.write("parquet/a.parquet", parquet(columns(&[])));
    dir.write("parquet/b.parquet", parquet(columns(&rows)));
    dir.configure("[sources]\nlog = \"parquet\"", SELECT);
    assert!(dir.build("dataset-parquet").1 == expected);
    dir.write("json/a.json.gz", compressed("", "gz"));
    dir.write("json/b.json", json_lines(&rows));
    let keys = "path = \"json\", missing_columns = \"null\"";
    dir.configure(&format!("[sources]\nlog = {{ {keys}, {TIME} }}"), SELECT);
    assert!(dir.build("dataset-json").1 == expected);
    dir.configure("[sources]\nlog = \"parquet/a.parquet\"", SELECT);
    dir.fails(&["gives no samples", "check that the logs are not empty"]);
}

#[cfg(unix)]
#[test]
fn an_unreadable_folder_or_file_is_named() {
    use std::os::unix::fs::{PermissionsExt, chown};
    use std::os::unix::process::CommandExt;

    let dir = Dir::new();
    dir.write("log/day=1/a.parquet", parquet(columns(&rows())));
    dir.write("log/day=2/a.parquet", parquet(columns(&rows())));
    dir.configure("[sources]\nlog = \"log\"", SELECT);
    let mode = |name: &str, mode: u32| {
        fs_err::set_permissions(dir.path(name), std::fs::Permissions::from_mode(mode)).unwrap();
    };
    // Root may read all files, so root runs the program as another user, from a copy that this user may execute.
    let root = fs_err::metadata("/proc/self").is_ok_and(|process| {
        use std::os::unix::fs::MetadataExt;
        process.uid() == 0
    });
    let program = || {
        let mut command = dir.program("failed");
        if root {
            let copy = dir.path("program");
            if !copy.exists() {
                fs_err::copy(command.get_program(), &copy).unwrap();
                mode("", 0o755);
                mode("program", 0o755);
                chown(&copy, Some(65534), Some(65534)).unwrap();
            }
            let mut other = std::process::Command::new(copy);
            other.args(command.get_args()).current_dir(dir.path("")).env("RUST_BACKTRACE", "0");
            other.uid(65534).gid(65534);
            command = other;
        }
        command
    };
    mode("log/day=2/a.parquet", 0o000);
    dir.fails_as(program(), &["source `log`", "log/day=2/a.parquet", "cannot be read", "readable"]);
    mode("log/day=2/a.parquet", 0o644);
    mode("log/day=2", 0o000);
    let folder = ["source `log`", "log/day=2", "cannot be read", "readable"];
    dir.fails_as(program(), &folder);
    dir.configure("[sources]\nlog = \"log/*/*.parquet\"", SELECT);
    dir.fails_as(program(), &folder);
    mode("log/day=2", 0o755);
}
