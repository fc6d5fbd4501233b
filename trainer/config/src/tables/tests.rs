use onefold_datasets::FeatureGroup;

use super::*;

fn schema() -> Schema {
    let feature = |name: &str, kind| SparseFeature::new(name, kind);
    let group = |name: &str, features| FeatureGroup { name: name.into(), deduplicated: true, features };
    Schema {
        labels: vec!["label".into()],
        weight: None,
        dense: vec![],
        kept: Vec::new(),
        groups: vec![
            group("user", vec![feature("user_id", SparseKind::Sparse), feature("city", SparseKind::Sparse)]),
            group("history", vec![feature("history", SparseKind::Sequence)]),
        ],
    }
}

fn embedding() -> EmbeddingConfig {
    let (pooling, ids, dtype) = (Pooling::Sum, IdPolicy::Checked, DataType::Fp32);
    let rows = Some(Rows::Number(1000));
    EmbeddingConfig { dim: 64, rows, pooling, ids: Some(ids), dtype, ..EmbeddingConfig::default() }
}

fn overrides(text: &str) -> BTreeMap<String, TableOverride> {
    toml::from_str(text).unwrap()
}

fn refused(embedding: &EmbeddingConfig, text: &str) -> String {
    resolve_tables(embedding, &overrides(text), &schema(), &KnownIds::default()).unwrap_err().to_string()
}

#[test]
fn overrides_replace_defaults_in_schema_order() {
    let overrides = overrides("[history]\nrows = 7\npooling = \"attention\"\n[city]\nids = \"hashed\"");
    let tables = resolve_tables(&embedding(), &overrides, &schema(), &KnownIds::default()).unwrap();
    let table = |feature: &str, rows, pooling, ids| FeatureConfig {
        feature: feature.into(),
        table: None,
        rows,
        dim: 64,
        pooling,
        target: None,
        ids,
        dtype: DataType::Fp32,
    };
    assert_eq!(
        tables,
        [
            table("user_id", 1000, Pooling::Sum, IdPolicy::Checked),
            table("city", 1000, Pooling::Sum, IdPolicy::Hashed),
            table("history", 7, Pooling::Attention, IdPolicy::Checked),
        ]
    );
}

/// Returns the rows and the id policy of `user_id`, `city` and `history`.
fn rows(embedding: &str, overridden: &str, counts: &[(&str, u64)]) -> Result<Vec<(u64, IdPolicy)>> {
    let embedding: EmbeddingConfig = toml::from_str(embedding).unwrap();
    let of = |(name, count): &(&str, u64)| {
        ((*name).to_owned(), IdCount { count: *count, numbered: *name == "user_id" })
    };
    let counts = counts.iter().map(of).collect();
    let known = KnownIds { counts, rows: BTreeMap::from([("city".to_owned(), 16)]) };
    let tables = resolve_tables(&embedding.with_dim(&[8, 4]), &overrides(overridden), &schema(), &known)?;
    assert!(tables.iter().all(|table| table.dim == 4));
    Ok(tables.iter().map(|table| (table.rows, table.ids)).collect())
}

#[test]
fn rows_follow_the_ids_that_the_dataset_knows() {
    use IdPolicy::{Checked, Hashed};
    let counts = [("user_id", 1_000), ("city", 15)];
    // By default, ids are hashed where their number is unknown or too large. An existing table keeps its rows
    // while they suffice.
    let expected = [(1_100, Checked), (16, Checked), (HASHED_ROWS, Hashed)];
    assert_eq!(rows("", "", &counts).unwrap(), expected);
    let expected = [(1_100, Checked), (19, Checked), (HASHED_ROWS, Hashed)];
    assert_eq!(rows("", "", &[("user_id", 1_000), ("city", 17)]).unwrap(), expected);
    // A vocabulary has no limit, because all of its ids occur.
    let many = [("user_id", 2 * MOST_ROWS), ("city", MOST_ROWS), ("history", MOST_ROWS + 1)];
    let expected = [(2_200_000, Checked), (1_100_000, Checked), (HASHED_ROWS, Hashed)];
    assert_eq!(rows("", "", &many).unwrap(), expected);
    let given = "[user_id]\nids = \"hashed\"\n[city]\nrows = 7\n[history]\nrows = 9\nids = \"hashed\"";
    let expected = [(HASHED_ROWS, Hashed), (7, Checked), (9, Hashed)];
    assert_eq!(rows("headroom = 0.5", given, &counts).unwrap(), expected);
    let expected = [(1_500, Checked), (16, Checked), (9, Hashed)];
    let all = "rows = \"vocabulary\"\nheadroom = 0.5";
    assert_eq!(rows(all, "[history]\nrows = 9\nids = \"hashed\"", &counts).unwrap(), expected);
    // A shared table has a row for every id of all its features.
    let shared = "[city]\ntable = \"t\"\n[history]\ntable = \"t\"\nrows = \"vocabulary\"";
    let expected = [(1_000, Checked), (500, Checked), (500, Checked)];
    let three = [("user_id", 1_000), ("city", 15), ("history", 500)];
    assert_eq!(rows("headroom = 0", shared, &three).unwrap(), expected);
    let unknown = rows("", shared, &counts).unwrap_err().to_string();
    assert!(unknown.contains("`[tables.city]`") && unknown.contains("does not know"), "{unknown}");
    let refused = |embedding: &str, given: &str| rows(embedding, given, &counts).unwrap_err().to_string();
    assert!(refused("rows = \"vocabulary\"", "").contains("feature `history` has ids whose number"));
    assert!(refused("ids = \"checked\"", "").contains("feature `history` has ids whose number"));
    let both = "[city]\nrows = \"vocabulary\"\nids = \"hashed\"";
    assert!(refused("", both).contains("has `rows = \"vocabulary\"` and `ids = \"hashed\"`"));
    assert!(refused("headroom = -0.1", "").contains("`headroom` is -0.1"));
    for (text, wrong) in [("rows = \"all\"", "\"all\""), ("rows = -1", "-1"), ("rows = 1.5", "1.5")] {
        let error = toml::from_str::<EmbeddingConfig>(text).unwrap_err().to_string();
        assert!(error.contains(wrong) && error.contains("or \"vocabulary\""), "{error}");
    }
    let text = "dim = 4\nrows = \"vocabulary\"\nheadroom = 0.1\npooling = \"sum\"\n";
    assert_eq!(toml::to_string(&toml::from_str::<EmbeddingConfig>(text).unwrap()).unwrap(), text);
}

#[test]
fn a_table_may_have_another_type_than_the_others() {
    let embedding = EmbeddingConfig { dtype: DataType::Bf16, ..embedding() };
    let tables =
        resolve_tables(&embedding, &overrides("[city]\ndtype = \"fp32\""), &schema(), &KnownIds::default())
            .unwrap();
    let types: Vec<_> = tables.iter().map(|table| table.dtype).collect();
    assert_eq!(types, [DataType::Bf16, DataType::Fp32, DataType::Bf16]);
    assert!(toml::from_str::<TableOverride>("dtype = \"fp8\"").unwrap_err().to_string().contains("fp8"));
}

#[test]
fn a_table_may_be_narrower_than_the_others() {
    let resolved = |text: &str| {
        let features = resolve_tables(&embedding(), &overrides(text), &schema(), &KnownIds::default());
        features.unwrap().iter().map(|feature| feature.dim).collect::<Vec<_>>()
    };
    assert_eq!(resolved("[city]\ndim = 6\n[user_id]\ndim = 64"), [64, 6, 64]);
    // The dimension is that of the table, for all features that share it.
    let shared = "[city]\ntable = \"t\"\ndim = 6\n[history]\ntable = \"t\"\npooling = \"mean\"";
    assert_eq!(resolved(shared), [64, 6, 6]);
    for (text, expected) in [
        (
            "[city]\ndim = 65",
            "`[tables.city]`: `dim` is 65, but `[embedding].dim`, the common dimension, is 64",
        ),
        ("[city]\ndim = 0", "`[tables.city]`: table of feature `city`: it has 1000 rows of dimension 0"),
        (
            "[history]\ndim = 8\npooling = \"encoder\"",
            "`[tables.history]`: `dim` is 8, but the feature pools by encoder, which needs vectors of `[embedding].dim`, 64",
        ),
        (
            "[city]\ndim = 8\n[history]\npooling = \"din\"\ntarget = \"city\"",
            "the target of `history` is `city`, whose table has `dim = 8`, and din needs vectors of `[embedding].dim`, 64",
        ),
        (
            "[city]\ntable = \"t\"\ndim = 8\n[user_id]\ntable = \"t\"\ndim = 4",
            "`dim` is 4, but 8 under `[tables.city]`, whose table `t` is the same",
        ),
    ] {
        let error = refused(&embedding(), text);
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn features_share_the_table_that_they_name() {
    let shared = "[city]\ntable = \"places\"\nrows = 7\n[history]\ntable = \"places\"\npooling = \"attention\"\nids = \"hashed\"";
    let features = resolve_tables(&embedding(), &overrides(shared), &schema(), &KnownIds::default()).unwrap();
    let settings = |feature: &FeatureConfig| (feature.rows, feature.ids, feature.pooling);
    assert_eq!(settings(&features[1]), (7, IdPolicy::Hashed, Pooling::Sum));
    assert_eq!(settings(&features[2]), (7, IdPolicy::Hashed, Pooling::Attention));
    let (tables, numbers) = tables_of(&features);
    let table = |name: &str, rows| TableConfig { name: name.into(), rows, dim: 64, dtype: DataType::Fp32 };
    assert_eq!((tables, numbers), (vec![table("user_id", 1000), table("places", 7)], vec![0, 1, 1]));
    // A run stores features as JSON; features without a shared table have no key `table`.
    let text = serde_json::to_string(&features).unwrap();
    assert_eq!(serde_json::from_str::<Vec<FeatureConfig>>(&text).unwrap(), features);
    assert_eq!(text.matches(r#""table":"places""#).count(), 2);
    assert!(!serde_json::to_string(&features[0]).unwrap().contains("table"));
    // A feature may name its own table explicitly.
    let own = "[city]\ntable = \"city\"\n[user_id]\ntable = \"city\"";
    let features = resolve_tables(&embedding(), &overrides(own), &schema(), &KnownIds::default()).unwrap();
    assert_eq!(tables_of(&features).1, [0, 0, 1]);
    assert_eq!((features[0].table_name(), &features[1].table), ("city", &None));
}

#[test]
fn features_that_share_a_table_agree_about_it() {
    let both = |first: &str, second: &str| {
        let text = format!("[city]\ntable = \"places\"\n{first}\n[user_id]\ntable = \"places\"\n{second}");
        refused(&embedding(), &text)
    };
    assert_eq!(
        both("rows = 7", "rows = 8"),
        "`[tables.user_id]`: `rows` is 8, but 7 under `[tables.city]`, whose table `places` is the same\n  \
         hint: features that share a table agree on `rows`: give it once, or the same under both"
    );
    assert!(
        both("ids = \"hashed\"", "ids = \"checked\"").contains("`ids` is \"checked\", but \"hashed\" under")
    );
    assert!(both("dtype = \"bf16\"", "dtype = \"fp16\"").contains("`dtype` is \"fp16\", but \"bf16\" under"));
    let taken = refused(&embedding(), "[city]\ntable = \"user_id\"");
    assert_eq!(
        taken,
        "`[tables.city]`: feature `city` has the table `user_id`, which is that of the feature `user_id` alone\n  \
         hint: to share it, set `table = \"user_id\"` under `[tables.user_id]` too; or choose another name"
    );
    assert!(refused(&embedding(), "[city]\ntable = \"\"").contains("feature `city` has the table ``"));
    assert!(refused(&embedding(), "[city]\ntable = \"a[1]\"").contains("a name without brackets"));
    // Ids are checked for each of the features that share a table.
    let shared = overrides("[city]\ntable = \"places\"\n[user_id]\ntable = \"places\"\nrows = 9");
    let features = resolve_tables(&embedding(), &shared, &schema(), &KnownIds::default()).unwrap();
    let ids = FeatureStatistics { values: 9, min_id: Some(0), max_id: Some(9), max_length: 1 };
    let error = check_ids(&features, &BTreeMap::from([("city".to_owned(), ids)])).unwrap_err().to_string();
    assert!(
        error.starts_with("`[tables.city]`: feature `city` has the id 9, its table has 9 rows"),
        "{error}"
    );
    assert!(error.contains("the `rows` of the table `places`"), "{error}");
}

#[test]
fn an_unknown_feature_gets_the_nearest_name() {
    assert_eq!(
        refused(&embedding(), "[histroy]\nrows = 7"),
        "`[tables.histroy]`: the dataset has no sparse feature `histroy`\n  hint: did you mean `history`? \
         Known names: `user_id`, `city`, `history`"
    );
}

#[test]
fn impossible_sizes_are_refused_where_they_are_written() {
    assert_eq!(
        refused(&embedding(), "[city]\nrows = 0"),
        "`[tables.city]`: table of feature `city`: it has 0 rows of dimension 64, both must be at least 1\n  \
         hint: give `rows` and `dim` the size that the table of this feature should have"
    );
    let dimensionless = EmbeddingConfig { dim: 0, ..embedding() };
    assert!(
        refused(&dimensionless, "[user_id]\nrows = 3")
            .starts_with("`[embedding]`: table of feature `user_id`")
    );
    let huge = EmbeddingConfig { rows: Some(Rows::Number(u64::MAX / 8)), dim: 1, ..embedding() };
    assert!(resolve_tables(&huge, &BTreeMap::new(), &schema(), &KnownIds::default()).is_ok());
    let overflowing = EmbeddingConfig { rows: Some(Rows::Number(i64::MAX as u64)), dim: 4, ..embedding() };
    assert!(refused(&overflowing, "").contains("more bytes than can be addressed"));
    let unaddressable = EmbeddingConfig { rows: Some(Rows::Number(1 << 61)), dim: 1, ..embedding() };
    assert!(refused(&unaddressable, "").contains("more bytes than can be addressed"));
}

#[test]
fn attention_needs_a_sequence() {
    let error = refused(&embedding(), "[city]\npooling = \"attention\"");
    assert!(
        error.starts_with("`[tables.city]`: feature `city` pools by attention but is not a sequence"),
        "{error}"
    );
    assert!(error.contains("\n  hint: set `pooling = \"sum\"`"), "{error}");
    let everywhere = EmbeddingConfig { pooling: Pooling::Attention, ..embedding() };
    assert!(refused(&everywhere, "").starts_with("`[embedding]`: feature `user_id`"));
}

#[test]
fn encoder_and_din_need_a_sequence_too() {
    let error = refused(&embedding(), "[city]\npooling = \"encoder\"");
    assert!(error.starts_with("`[tables.city]`: feature `city` pools by encoder but is not"), "{error}");
    let error = refused(&embedding(), "[city]\npooling = \"din\"\ntarget = \"user_id\"");
    assert!(error.starts_with("`[tables.city]`: feature `city` pools by din but is not"), "{error}");
}

#[test]
fn din_has_a_target_that_is_pooled() {
    let din = |target: &str| overrides(&format!("[history]\npooling = \"din\"\n{target}"));
    let resolve = |embedding: &EmbeddingConfig, target: &str| {
        resolve_tables(embedding, &din(target), &schema(), &KnownIds::default())
    };
    let tables = resolve(&embedding(), "target = \"city\"").unwrap();
    assert_eq!(tables[2].target.as_deref(), Some("city"));
    // The default target applies only to tables that pool by `din`.
    let default = EmbeddingConfig { target: Some("user_id".into()), ..embedding() };
    let targets: Vec<_> = resolve(&default, "").unwrap().into_iter().map(|table| table.target).collect();
    assert_eq!(targets, [None, None, Some("user_id".to_owned())]);
    let refused = |target: &str| resolve(&embedding(), target).unwrap_err().to_string();
    let none = refused("");
    assert!(none.starts_with("`[tables.history]`: feature `history` pools by din but has no target"));
    assert!(none.contains("\n  hint: name the feature that it attends with"), "{none}");
    assert_eq!(
        refused("target = \"citty\""),
        "`[tables.history]`: the target of `history` is `citty`, which is no sparse feature\n  hint: did you mean \
         `city`? Known names: `user_id`, `city`"
    );
    let itself = refused("target = \"history\"");
    assert!(itself.contains("the target of `history` is `history`, which pools by din"), "{itself}");
    let useless = resolve_tables(
        &embedding(),
        &overrides("[city]\ntarget = \"user_id\""),
        &schema(),
        &KnownIds::default(),
    );
    let useless = useless.unwrap_err().to_string();
    assert!(useless.starts_with("`[tables.city]`: feature `city` pools by sum but has a target"));
}

#[test]
fn sections_refuse_unknown_keys() {
    assert!(toml::from_str::<EmbeddingConfig>("dim = 4\nrows = 2\nlr = 1").is_err());
    assert!(toml::from_str::<TableOverride>("lr = 1").is_err());
    let defaults: EmbeddingConfig = toml::from_str("dim = 4\nrows = 2").unwrap();
    assert_eq!((defaults.pooling, defaults.ids), (Pooling::Sum, None));
}

#[test]
fn checked_ids_need_a_row_each_and_hashed_ids_do_not() {
    let ids = |min, max| FeatureStatistics { values: 9, min_id: Some(min), max_id: Some(max), max_length: 1 };
    let statistics = |min, max| BTreeMap::from([("city".to_owned(), ids(min, max))]);
    let tables = resolve_tables(&embedding(), &BTreeMap::new(), &schema(), &KnownIds::default()).unwrap();
    assert!(check_ids(&tables, &statistics(0, 999)).is_ok());
    let large = check_ids(&tables, &statistics(0, 1000)).unwrap_err().to_string();
    assert_eq!(
        large,
        "`[tables.city]`: feature `city` has the id 1000, its table has 1,000 rows\n  hint: set `rows = 1001` \
         under `[tables.city]`, or `ids = \"hashed\"` there"
    );
    assert!(check_ids(&tables, &statistics(-1, 5)).unwrap_err().to_string().contains("has the id -1"));
    let hashed =
        resolve_tables(&embedding(), &overrides("[city]\nids = \"hashed\""), &schema(), &KnownIds::default())
            .unwrap();
    assert!(check_ids(&hashed, &statistics(-1, 1 << 40)).is_ok());
}
