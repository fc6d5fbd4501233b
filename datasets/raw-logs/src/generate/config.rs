//! The two configuration files that are written with the logs.

use super::workload::{Change, GroupSpec, TABLE_DIM, TABLE_ROWS, Workload, dense_names};

impl Workload {
    /// Returns the text of `dataset.toml`, which describes how to build a dataset from the logs.
    pub(super) fn dataset_config(self) -> String {
        let mut text =
            format!("# The synthetic workload {}: how to build a dataset from its logs.\n", self.name());
        text += DATASET_HEAD;
        for name in dense_names() {
            text += &entry(&name, "dense", None);
        }
        for group in self.groups() {
            let kind = if is_sequence(&group) { "sequence" } else { "sparse" };
            for name in &group.features {
                text += &entry(name, kind, group.name.as_deref());
            }
        }
        text
    }

    /// Returns the text of `train.toml`, which describes the reference model of the workload.
    pub fn train_config(self) -> String {
        let groups = self.groups();
        let mut text = format!("# The reference model of the synthetic workload {}.\n", self.name());
        text += TRAIN_HEAD;
        let sequences = || groups.iter().filter(|group| is_sequence(group));
        if sequences().next().is_some() {
            text += "attention_heads = 2 # of the one self-attention block that all sequences share\n";
        }
        let tables = format!(
            "\n[embedding]\ndim = {TABLE_DIM}\nrows = {TABLE_ROWS}\npooling = \"sum\"\nids = \"checked\"\n"
        );
        text += &tables;
        for name in sequences().flat_map(|group| &group.features) {
            text += &format!("\n[tables.{name}]\npooling = \"attention\"\n");
        }
        text
    }

    /// Returns the numbers of pooled features, sequences and dense features.
    pub fn features(self) -> [usize; 3] {
        let groups = self.groups();
        let count = |sequences: bool| {
            let of_kind = groups.iter().filter(|group| is_sequence(group) == sequences);
            of_kind.map(|group| group.features.len()).sum()
        };
        [count(false), count(true), dense_names().len()]
    }
}

fn is_sequence(group: &GroupSpec) -> bool {
    matches!(group.change, Change::Slide { .. })
}

fn entry(name: &str, kind: &str, group: Option<&str>) -> String {
    let group = group.map_or_else(String::new, |group| format!(", group = \"{group}\""));
    format!("{name} = {{ kind = \"{kind}\"{group} }}\n")
}

/// The events are the left side of the join, because engines keep a hash table of that side.
const DATASET_HEAD: &str = r#"format_version = 1

[sources]
features = "features/*.parquet"
events = "events/*.parquet"

[samples]
query = """
SELECT f.*, e.label
FROM events e
JOIN features f ON e.request_id = f.request_id
"""

[session]
key = ["session_id"]
time = "timestamp"
order = ["request_id"]

[partition]
by = "hour"

[features]
label = { kind = "label" }
"#;

const TRAIN_HEAD: &str = r#"format_version = 1

[data]
label = "label"

[train]
batch_size = 2048
epochs = 1
seed = 1

[model]
bottom_mlp = [512, 256, 64]
top_mlp = [512, 256, 1]
interaction = "dot"
"#;

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    #[test]
    fn both_files_parse_and_name_every_feature_once() {
        for workload in Workload::value_variants() {
            let groups = workload.groups();
            let (dataset, train) = (workload.dataset_config(), workload.train_config());
            let parsed: toml::Table = dataset.parse().unwrap();
            let features = parsed["features"].as_table().unwrap();
            let columns = || groups.iter().flat_map(|group| &group.features);
            assert_eq!(features.len(), 1 + 13 + columns().count());
            let names = dense_names();
            for name in columns().chain(&names) {
                assert!(features.contains_key(name), "{name}");
                assert_eq!(dataset.matches(name.as_str()).count(), 1, "{name}");
            }
            let parsed: toml::Table = train.parse().unwrap();
            let tables = parsed.get("tables").map_or(0, |tables| tables.as_table().unwrap().len());
            assert_eq!(tables, if *workload == Workload::Rm1 { 6 } else { 0 });
            assert_eq!(parsed["model"].get("attention_heads").is_some(), *workload == Workload::Rm1);
            assert!(columns().all(|name| train.matches(name.as_str()).count() <= 1));
            let [pooled, sequences, dense] = workload.features();
            assert_eq!((sequences, pooled + sequences, dense), (tables, columns().count(), 13));
        }
    }

    #[test]
    fn only_item_features_have_no_group() {
        let text = Workload::Rm1.dataset_config();
        assert!(text.contains("user_00 = { kind = \"sparse\", group = \"user_a\" }\n"), "{text}");
        assert!(text.contains("sequence_03 = { kind = \"sequence\", group = \"timeline_b\" }\n"), "{text}");
        assert!(text.contains("item_11 = { kind = \"sparse\" }\n"), "{text}");
    }
}
