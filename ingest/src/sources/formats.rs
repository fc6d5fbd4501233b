//! Determines the format of a file from its name, the configuration, and its first bytes.

use std::path::Path;

use datafusion::datasource::file_format::file_compression_type::FileCompressionType;

use super::csv::CsvRules;
use crate::config::{Compression, Format, Quote, Ragged, SourceConfig};

/// Options that define how the bytes of a source's files are parsed into rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Dialect {
    pub(super) format: Format,
    /// The separator of the values of a CSV row.
    pub(super) delimiter: u8,
    /// Whether CSV files begin with a row of column names.
    pub(super) header: bool,
    pub(super) quote: Quote,
    pub(super) escape: Option<u8>,
    pub(super) ragged: Ragged,
}

/// The properties that the endings of a file's name define: format, compression, and whether values are separated
/// by tabs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct NameEndings {
    pub(super) format: Option<Format>,
    pub(super) compression: Option<Compression>,
    pub(super) tabs: bool,
}

/// Parses the endings of a file's name.
pub(super) fn endings_of(path: &Path) -> NameEndings {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
    let endings = [
        (".gz", Compression::Gzip),
        (".bz2", Compression::Bzip2),
        (".xz", Compression::Xz),
        (".zst", Compression::Zstd),
    ];
    let packed = endings.iter().find_map(|(ending, packed)| Some((name.strip_suffix(ending)?, *packed)));
    let (stem, compression) = packed.map_or((name.as_str(), None), |(stem, packed)| (stem, Some(packed)));
    let (format, tabs) = match stem.rsplit_once('.').map(|(_, ending)| ending) {
        Some("parquet") => (Some(Format::Parquet), false),
        Some("csv") => (Some(Format::Csv), false),
        Some("tsv") => (Some(Format::Csv), true),
        Some("json" | "jsonl" | "ndjson") => (Some(Format::Json), false),
        _ => (None, false),
    };
    NameEndings { format, compression, tabs }
}

impl Dialect {
    /// Returns the dialect of files of `config` with these name endings; `None` if neither defines the format.
    pub(super) fn new(config: &SourceConfig, endings: NameEndings) -> Option<Self> {
        Some(Self::of_format(config.format.or(endings.format)?, config, endings))
    }

    /// Returns the dialect of files of `config` with this format.
    pub(super) fn of_format(format: Format, config: &SourceConfig, endings: NameEndings) -> Self {
        let delimiter = config.delimiter.unwrap_or(if endings.tabs { b'\t' } else { b',' });
        let SourceConfig { header, quote, escape, ragged, .. } = *config;
        Self { format, delimiter, header, quote, escape, ragged }
    }

    /// Returns the rules for CSV files whose rows have `columns` columns.
    pub(super) fn csv_rules(&self, columns: Option<usize>) -> CsvRules {
        let Self { delimiter, header, quote, escape, ragged, .. } = *self;
        CsvRules { delimiter, header, quote, escape, ragged, columns }
    }
}

/// Converts a compression to DataFusion's type.
pub(super) fn engine_compression(compression: Compression) -> FileCompressionType {
    match compression {
        Compression::None => FileCompressionType::UNCOMPRESSED,
        Compression::Gzip => FileCompressionType::GZIP,
        Compression::Bzip2 => FileCompressionType::BZIP2,
        Compression::Xz => FileCompressionType::XZ,
        Compression::Zstd => FileCompressionType::ZSTD,
    }
}

/// Returns a message if the first bytes of a file show that it is not text.
pub(super) fn not_text(bytes: &[u8]) -> Option<&'static str> {
    let starts = [
        (&b"PAR1"[..], "it is a Parquet file"),
        (b"\x1f\x8b", "it is compressed with gzip"),
        (b"BZh", "it is compressed with bzip2"),
        (b"\xfd7zXZ\0", "it is compressed with xz"),
        (b"\x28\xb5\x2f\xfd", "it is compressed with zstd"),
        (b"\xff\xfe", "it is text in UTF-16, not in UTF-8"),
        (b"\xfe\xff", "it is text in UTF-16, not in UTF-8"),
    ];
    let known = starts.iter().find(|(magic, _)| bytes.starts_with(magic));
    known.map(|(_, message)| *message).or(bytes.contains(&0).then_some("it is not text"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endings_say_format_and_compression() {
        let tells = |name: &str| {
            let endings = endings_of(Path::new(name));
            (endings.format, endings.compression, endings.tabs)
        };
        assert_eq!(tells("a/b.parquet"), (Some(Format::Parquet), None, false));
        assert_eq!(tells("a.csv"), (Some(Format::Csv), None, false));
        assert_eq!(tells("a.tsv.gz"), (Some(Format::Csv), Some(Compression::Gzip), true));
        assert_eq!(tells("A.JSONL.ZST"), (Some(Format::Json), Some(Compression::Zstd), false));
        assert_eq!(tells("a.ndjson.xz"), (Some(Format::Json), Some(Compression::Xz), false));
        assert_eq!(tells("a.json.bz2"), (Some(Format::Json), Some(Compression::Bzip2), false));
        assert_eq!(tells("part-0.gz"), (None, Some(Compression::Gzip), false));
        assert_eq!(tells("csv"), (None, None, false));
        assert_eq!(tells("csv.d/part-0"), (None, None, false));
    }

    #[test]
    fn binary_files_are_recognized() {
        assert_eq!(not_text(b"PAR1...."), Some("it is a Parquet file"));
        assert_eq!(not_text(b"\x28\xb5\x2f\xfd."), Some("it is compressed with zstd"));
        assert_eq!(not_text(b"a,b\n1,\0\n"), Some("it is not text"));
        assert_eq!(not_text(b"\xff\xfea\0"), Some("it is text in UTF-16, not in UTF-8"));
        assert_eq!(not_text("a,b\n1,é\n".as_bytes()), None);
    }
}
