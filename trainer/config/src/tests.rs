use onefold_datasets::{FeatureGroup, Schema, SparseFeature, SparseKind};

use super::*;

const WHOLE: &str = r#"
format_version = 1
[data]
train = "split=train"
eval = "split=holdout"
label = "label"
[train]
batch_size = 128
epochs = 1
seed = 1
[model]
bottom_mlp = [8, 4]
top_mlp = [8, 1]
interaction = "dot"
[embedding]
dim = 4
rows = 100
[tables.history]
pooling = "mean"
[optimizer.tables]
kind = "row_wise_adagrad"
learning_rate = 0.02
[optimizer.dense]
kind = "sgd"
learning_rate = 0.1
"#;

fn refused(from: &str, to: &str) -> String {
    assert!(WHOLE.contains(from));
    TrainConfig::parse(Path::new("train.toml"), &WHOLE.replace(from, to)).unwrap_err().to_string()
}

#[test]
fn every_mistake_names_its_place() {
    TrainConfig::parse(Path::new("train.toml"), WHOLE).unwrap();
    assert!(refused("format_version = 1", "format_version = 3").contains("`format_version` is 3"));
    assert!(
        refused("[8, 4]", "[8, 5]").contains("`[model].bottom_mlp` is [8, 5], but `[embedding].dim` is 4")
    );
    assert!(refused("[8, 1]", "[]").contains("`[model].top_mlp` is []"));
    let pools = |heads: &str, pooling: &str| format!("{heads}\n[embedding]\npooling = \"{pooling}\"");
    let wrong = refused("[embedding]", &pools("attention_heads = 3", "attention"));
    assert!(wrong.contains("`[model].attention_heads` is 3, `[embedding].dim` is 4"));
    // Nothing uses these heads.
    let unused = WHOLE.replace("[embedding]", &pools("attention_heads = 3", "encoder"));
    TrainConfig::parse(Path::new("train.toml"), &unused).unwrap();
    let block = |key: &str| refused("interaction = \"dot\"", &format!("interaction = \"dot\"\n{key}"));
    assert!(block("encoder_heads = 0").contains("`[model].encoder_heads` is 0, `[embedding].dim` is 4"));
    let wide = "[9223372036854775807, 4]";
    assert!(
        refused("[8, 4]", wide)
            .contains("`[model].bottom_mlp` has 9223372036854775807\n  hint: give at most")
    );
    assert!(block("encoder_hidden = 16777217").contains("`[model].encoder_hidden` has 16777217"));
    assert!(block("encoder_hidden = 0").contains("`[model].encoder_hidden` is 0"));
    assert!(block("din_hidden = []").contains("`[model].din_hidden` is []"));
    assert!(block("din_hidden = [8, -1]").contains("`[model].din_hidden` is [8, -1]"));
    assert!(refused("interaction = \"dot\"", "interaction = \"cross\"").contains("interaction"));
    let dcn = "interaction = \"dcn\"\ndcn_low_rank_dim = 0";
    assert!(refused("interaction = \"dot\"", dcn).contains("`dcn_low_rank_dim` is 0"));
    assert!(refused("epochs = 1", "epochs = 0").contains("`[train]`"));
    assert!(
        refused("learning_rate = 0.1", "learning_rate = -1.0").contains("`[optimizer.dense].learning_rate`")
    );
    assert!(
        refused("learning_rate = 0.02", "learning_rate = -1.0")
            .contains("`[optimizer.tables]` has a learning")
    );
    assert!(
        refused("learning_rate = 0.02", "learning_rate = 0.02\nmax_row_grad_norm = 0.0")
            .contains("`[optimizer.tables].max_row_grad_norm` is 0")
    );
    assert!(refused("rows = 100", "rows = 100\ndtype = \"fp8\"").contains("unknown variant `fp8`"));
    let data = |key: &str| refused("label = \"label\"", &format!("label = \"label\"\n{key}"));
    assert!(
        data("labels_as_of = \"2026-03-02\"").contains("`[data].labels_as_of`: `2026-03-02` is not a time")
    );
    assert!(data("label_age = \"3\"").contains("`[data].label_age`: `3` is not a duration"));
    let more = |text: &str| refused("[model]", &format!("{text}\n[model]"));
    assert!(more("[evaluation]\nevery_steps = 0").contains("`[evaluation].every_steps` is 0"));
    assert!(more("[checkpoint]\nkeep = 0").contains("`[checkpoint].keep` is 0"));
    for minutes in ["-1.0", "nan", "inf"] {
        let message = more(&format!("[checkpoint]\nevery_minutes = {minutes}"));
        assert!(message.contains("`[checkpoint].every_minutes` is "), "{message}");
    }
    assert!(more("[early_stopping]\npatience = 2").contains("`[evaluation].every_steps` is not"));
    assert!(more("[schedule.dense]\nkind = \"cosine\"").contains("`decay_steps` is not given"));
    assert!(more("[schedule.tables]\ngamma = 2.0").contains("`[schedule.tables].gamma` is 2"));
    assert!(refused("kind = \"sgd\"", "kind = \"adam\"\nmomentum = 0.9").contains("only `kind = \"sgd\"`"));
    assert!(refused("kind = \"sgd\"", "kind = \"adam\"\nbetas = [0.9, 1.0]").contains("betas"));
    assert!(refused("epochs = 1", "epochs = 1\nepoch = 2").contains("unknown field `epoch`"));
}

/// Every hint is followed literally, and the configuration is then accepted.
#[test]
fn hints_lead_to_a_configuration_that_is_accepted() {
    /// A text that occurs in the configuration, and the one in its place.
    type Edit = (&'static str, &'static str);
    const DOT: &str = "interaction = \"dot\"";
    let edited = |edits: &[Edit]| {
        edits.iter().fold(WHOLE.to_owned(), |text, (from, to)| {
            assert!(text.contains(from), "no `{from}` in:\n{text}");
            text.replacen(from, to, 1)
        })
    };
    let parse = |text: &str| TrainConfig::parse(Path::new("train.toml"), text);
    let cases: [(Edit, &str, &[Edit]); 12] = [
        (("[8, 4]", "[8, 5]"), "the last must be the embedding dimension", &[("dim = 4", "dim = 5")]),
        (("[8, 4]", "[16777217, 4]"), "give at most 16777216", &[("[16777217, 4]", "[16777216, 4]")]),
        (
            ("[embedding]", "attention_heads = 3\n[embedding]\npooling = \"attention\""),
            "the dimension must be a multiple of the heads",
            &[("attention_heads = 3", "attention_heads = 2")],
        ),
        ((DOT, "encoder_hidden = 0"), "give a positive width", &[("hidden = 0", "hidden = 8")]),
        ((DOT, "encoder_hidden = 0"), "or leave it out", &[("encoder_hidden = 0", "")]),
        ((DOT, "din_hidden = []"), "give at least one layer", &[("din_hidden = []", "din_hidden = [8]")]),
        (
            (DOT, "interaction = \"dcn\"\ndcn_low_rank_dim = 0"),
            "both must be at least 1",
            &[("dcn_low_rank_dim = 0", "dcn_low_rank_dim = 1")],
        ),
        (("[8, 1]", "[8, 2]"), "the last must be 1", &[("[8, 2]", "[8, 1]")]),
        (
            ("[8, 1]", "[8, 2]"),
            "several labels are given in `[[tasks]]`",
            &[("label = \"label\"\n", "[[tasks]]\nlabel = \"label\"\n[[tasks]]\nlabel = \"like\"\n")],
        ),
        (
            ("[model]", "[early_stopping]\npatience = 2\n[model]"),
            "say after how many steps the model is evaluated",
            &[("[model]", "[evaluation]\nevery_steps = 5\n[model]")],
        ),
        (
            ("kind = \"sgd\"", "kind = \"adam\"\nmomentum = 0.9"),
            "only `kind = \"sgd\"` has one; leave it out",
            &[("momentum = 0.9", "")],
        ),
        (
            ("[model]", "[schedule.dense]\nkind = \"cosine\"\n[model]"),
            "give the steps that the decay takes",
            &[("kind = \"cosine\"", "kind = \"cosine\"\ndecay_steps = 10")],
        ),
    ];
    for (wrong, hint, right) in cases {
        let error = parse(&edited(&[wrong])).unwrap_err().to_string();
        let (_, hints) = error.split_once("\n  hint: ").unwrap();
        assert!(hints.contains(hint), "{error}");
        let mut followed = vec![wrong];
        followed.extend(right);
        parse(&edited(&followed)).unwrap();
    }

    let history = SparseFeature::new("history", SparseKind::Sequence);
    let group = FeatureGroup { name: "user".into(), deduplicated: true, features: vec![history] };
    let schema = Schema {
        labels: vec!["label".into()],
        weight: None,
        dense: Vec::new(),
        kept: Vec::new(),
        groups: vec![group],
    };
    let resolved = |edits: &[Edit]| {
        let config = parse(&edited(edits)).unwrap();
        resolve_tables(&config.embedding, &config.tables, &schema, &Default::default())
    };
    let wide = ("[tables.history]", "[tables.history]\ndim = 5");
    let error = resolved(&[wide]).unwrap_err().to_string();
    assert!(error.contains("raise `[embedding].dim` and the last width of `[model].bottom_mlp`"), "{error}");
    assert_eq!(resolved(&[wide, ("dim = 4", "dim = 5"), ("[8, 4]", "[8, 5]")]).unwrap()[0].dim, 5);
    assert_eq!(resolved(&[wide, ("dim = 5", "dim = 4")]).unwrap()[0].dim, 4);
}

/// Every log has at least 20 points, or one per step in shorter runs, independent of where a run ends or
/// resumes.
#[test]
fn the_first_steps_are_logged_densely() {
    let default = LoopConfig::default();
    let points = |steps: u64| (1..=steps).filter(|step| default.logs_at(*step)).count();
    for steps in 1..=1000 {
        assert!(points(steps) as u64 >= steps.min(20), "{steps}");
    }
    assert_eq!((points(34), points(1000)), (27, 92));
    let given = LoopConfig { log_every_steps: Some(7), ..default };
    assert_eq!((0..30).filter(|step| given.logs_at(*step)).collect::<Vec<_>>(), [7, 14, 21, 28]);
}

/// A minimal configuration, with `[data]` and `[model]` only.
const LEAST: &str =
    "format_version = 1\n[data]\nlabel = \"label\"\n[model]\nbottom_mlp = [8, 4]\ntop_mlp = [8, 1]\n";

#[test]
fn all_but_data_and_model_have_defaults() {
    let parse = |text: &str| TrainConfig::parse(Path::new("train.toml"), &format!("{LEAST}{text}"));
    let config = parse("").unwrap();
    assert_eq!((config.embedding.dim, config.train.batch_size, config.train.epochs), (4, 2048, 1));
    assert_eq!(config.model.interaction, Interaction::Dot);
    assert_eq!(config.checkpoint.interval(), Some(std::time::Duration::from_secs(1800)));
    let never = parse("[checkpoint]\nevery_minutes = 0\n").unwrap();
    assert_eq!(never.checkpoint.interval(), None);
    let dense = |text: &str| parse(text).unwrap().optimizer.dense;
    let DenseOptimizerConfig { kind, learning_rate, max_grad_norm, .. } = dense("");
    assert_eq!((kind, learning_rate, max_grad_norm), (DenseOptimizerKind::Adagrad, 0.005, Some(0.1)));
    // The default clipping applies only with the default rate; explicit settings are kept.
    assert_eq!(dense("[optimizer.dense]\neps = 1e-6\n").max_grad_norm, Some(0.1));
    assert_eq!(dense("[optimizer.dense]\nlearning_rate = 0.01\n").max_grad_norm, None);
    assert_eq!(dense("[optimizer.dense]\nmax_grad_norm = 2.0\n").max_grad_norm, Some(2.0));
    let tables = parse("[optimizer.tables]\neps = 1e-4\n").unwrap().optimizer.tables;
    assert_eq!((tables.kind, tables.learning_rate, tables.eps), (TableOptimizer::RowWiseAdagrad, 0.02, 1e-4));
    for part in ["dense", "tables"] {
        let error = parse(&format!("[optimizer.{part}]\nkind = \"adam\"\n")).unwrap_err().to_string();
        assert!(error.contains("`learning_rate` is missing"), "{error}");
    }
    // The stored configuration of a run parses to the same configuration.
    let stored = toml::to_string(&config).unwrap();
    let again = TrainConfig::parse(Path::new("train.toml"), &stored).unwrap();
    assert_eq!(toml::to_string(&again).unwrap(), stored);
}

#[test]
fn tasks_are_checked() {
    const TASKS: &str = "[[tasks]]\nlabel = \"click\"\n[[tasks]]\nlabel = \"like\"\nweight = 0.5\n[train]";
    let with = |text: &str| WHOLE.replace("label = \"label\"\n", "").replace("[train]", text);
    let parse = |text: &str| TrainConfig::parse(Path::new("train.toml"), text);
    let two = with(TASKS).replace("[8, 1]", "[8, 2]");
    let config = parse(&two).unwrap();
    let task = |label: &str, weight| TaskConfig { weight, ..TaskConfig::new(label) };
    assert_eq!(config.all_tasks(), [task("click", 1.0), task("like", 0.5)]);
    assert_eq!(parse(WHOLE).unwrap().all_tasks(), [task("label", 1.0)]);
    // The stored configuration of a run parses to the same configuration.
    assert_eq!(parse(&toml::to_string(&config).unwrap()).unwrap().all_tasks(), config.all_tasks());
    let refused = |text: &str| parse(text).unwrap_err().to_string();
    assert!(refused(&with("[train]")).contains("`[data].label` is missing"));
    assert!(refused(&with(TASKS)).contains("`[model].top_mlp` is [8, 1], but there are 2 tasks\n  hint: "));
    assert!(refused(&two.replace("like", "click")).contains("has the label `click` twice"));
    assert!(refused(&two.replace("0.5", "0.0")).contains("has the weight 0 for `like`"));
    let both = two.replace("[data]", "[data]\nlabel = \"click\"");
    assert!(refused(&both).contains("`[data].label` and `[[tasks]]` are both given"));
    let stopping = "[evaluation]\nevery_steps = 5\n[early_stopping]\npatience = 1\ntask = \"TASK\"\n[model]";
    let watching = |task: &str| two.replace("[model]", &stopping.replace("TASK", task));
    assert!(parse(&watching("like")).is_ok());
    assert!(refused(&watching("share")).contains("`[early_stopping].task` is `share`"));
    let schema = |labels: &[&str]| Schema {
        labels: labels.iter().map(|label| (*label).to_owned()).collect(),
        weight: None,
        dense: Vec::new(),
        kept: Vec::new(),
        groups: Vec::new(),
    };
    let found = config.tasks_of(&schema(&["like", "view", "click"])).unwrap();
    let columns: Vec<_> = found.iter().map(|(task, column)| (*column, task.weight)).collect();
    assert_eq!(columns, [(2, 1.0), (0, 0.5)]);
    let unknown = config.tasks_of(&schema(&["clicks", "like"])).unwrap_err().to_string();
    assert!(unknown.contains("`[[tasks]]` has the label `click`, which is no label"), "{unknown}");
    assert!(unknown.contains("did you mean `clicks`?"), "{unknown}");
}

#[test]
fn parameters_are_counted() {
    let config = TrainConfig::parse(Path::new("train.toml"), WHOLE).unwrap();
    let table = |pooling| FeatureConfig {
        feature: "x".into(),
        table: None,
        rows: 100,
        dim: 4,
        pooling,
        target: None,
        ids: crate::IdPolicy::Checked,
        dtype: crate::DataType::Fp32,
    };
    let other = |pooling| FeatureConfig { feature: "y".into(), ..table(pooling) };
    // Bottom 3-8-4: 32 + 36; top with two tables and the bottom vector (4 + 3)-8-1: 64 + 9.
    let count = config.parameters(&[table(Pooling::Sum), other(Pooling::Mean)], 3);
    assert_eq!((count.dense, count.embedding), (32 + 36 + 64 + 9, 800));
    // A shared table is counted once, but every feature contributes a vector.
    let shared = FeatureConfig { table: Some("x".into()), ..other(Pooling::Mean) };
    let count_of_shared = config.parameters(&[table(Pooling::Sum), shared], 3);
    assert_eq!((count_of_shared.dense, count_of_shared.embedding), (32 + 36 + 64 + 9, 400));
    assert_eq!(count.bytes(), 4 * (141 + 800 + 200));
    let narrow = FeatureConfig { dtype: crate::DataType::Bf16, ..table(Pooling::Sum) };
    let count = config.parameters(&[narrow, other(Pooling::Mean)], 3);
    assert_eq!((count.embedding, count.bytes()), (800, 4 * (141 + 400 + 200) + 2 * 400));
    // A table of dimension 3 is projected to 4 values, once for all features that share it.
    let narrow = FeatureConfig { dim: 3, ..table(Pooling::Sum) };
    let shared = FeatureConfig { table: Some("x".into()), dim: 3, ..other(Pooling::Mean) };
    let count = config.parameters(&[narrow, shared], 3);
    assert_eq!((count.dense, count.embedding), (32 + 36 + 64 + 9 + 12, 300));
    let mut adam = config.clone();
    adam.optimizer.tables.kind = TableOptimizer::Adam;
    assert_eq!(adam.parameters(&[table(Pooling::Sum)], 3).bytes(), 4 * (125 + 400 + 800));
    // Two cross layers of 12 x 3, 3 x 12 and a bias of 12; top 12-8-1: 104 + 9.
    let mut dcn = config.clone();
    dcn.model.interaction = Interaction::Dcn;
    (dcn.model.dcn_num_layers, dcn.model.dcn_low_rank_dim) = (2, 3);
    let count = dcn.parameters(&[table(Pooling::Sum), other(Pooling::Mean)], 3);
    assert_eq!(count.dense, 32 + 36 + 2 * 84 + 104 + 9);
    // Attention 4-12 and 4-4; without dense features, top 1-8-1.
    let count = config.parameters(&[table(Pooling::Attention), table(Pooling::Mean)], 0);
    assert_eq!(count.dense, 60 + 20 + 16 + 9);
    // Two norms of 2 x 4, attention as above, feed-forward 4-16-4.
    let count = config.parameters(&[table(Pooling::Encoder), table(Pooling::Mean)], 0);
    assert_eq!(count.dense, 16 + 80 + 80 + 68 + 16 + 9);
    // Attention unit 16-5-1.
    let mut din = config.clone();
    din.model.din_hidden = vec![5];
    let count = din.parameters(&[table(Pooling::Din), table(Pooling::Mean)], 0);
    assert_eq!(count.dense, 85 + 6 + 16 + 9);
}

#[test]
fn the_configuration_of_sequences_and_tasks_parses() {
    let text = include_str!("../../configs/rm1-sequences-tasks.toml");
    let config = TrainConfig::parse(Path::new("rm1-sequences-tasks.toml"), text).unwrap();
    let feature = |name: String, kind| SparseFeature::new(name, kind);
    let group = |name: &str, kind, features: std::ops::Range<u32>| FeatureGroup {
        name: name.into(),
        deduplicated: true,
        features: features.map(|i| feature(format!("{name}_{i:02}"), kind)).collect(),
    };
    let schema = Schema {
        labels: vec!["label".into(), "liked".into()],
        weight: None,
        dense: Vec::new(),
        kept: Vec::new(),
        groups: vec![
            group("user", SparseKind::Sparse, 0..24),
            group("sequence", SparseKind::Sequence, 0..6),
            group("item", SparseKind::Sparse, 0..12),
        ],
    };
    assert_eq!(config.tasks_of(&schema).unwrap().len(), 2);
    let tables = resolve_tables(&config.embedding, &config.tables, &schema, &Default::default()).unwrap();
    let targets: Vec<_> = tables.iter().filter_map(|table| table.target.as_deref()).collect();
    assert_eq!(targets, ["item_00", "item_00", "item_01"]);
    // Bottom 13-512-256-64; the pairs of 42 vectors and the bottom vector, concatenated with the 64 bottom
    // outputs.
    let (bottom, width) = (14 * 512 + 513 * 256 + 257 * 64, 64 + 43 * 42 / 2);
    let top = (width + 1) * 512 + 513 * 256 + 257 * 2;
    let din = 257 * 80 + 81 * 40 + 41;
    let encoder = 4 * 64 + 65 * 192 + 65 * 64 + 65 * 256 + 257 * 64;
    assert_eq!(config.parameters(&tables, 13).dense, bottom + top + din + encoder);
}

/// The expected numbers are from the benchmark's description: 204,184,588 rows of dimension 128, and 16.04
/// million dense parameters.
#[test]
fn the_mlperf_configuration_has_the_benchmarks_size() {
    let text = include_str!("../../configs/mlperf-dlrm-dcnv2.toml");
    let config = TrainConfig::parse(Path::new("mlperf-dlrm-dcnv2.toml"), text).unwrap();
    let feature = |i| SparseFeature::new(format!("cat_{i}"), SparseKind::Sparse);
    let features = (0..26).map(feature).collect();
    let group = FeatureGroup { name: "ungrouped".into(), deduplicated: false, features };
    let schema = Schema {
        labels: vec!["label".into()],
        weight: None,
        dense: Vec::new(),
        kept: Vec::new(),
        groups: vec![group],
    };
    let tables = resolve_tables(&config.embedding, &config.tables, &schema, &Default::default()).unwrap();
    let count = config.parameters(&tables, 13);
    assert_eq!(count.embedding, 204_184_588 * 128);
    let bottom = 14 * 512 + 513 * 256 + 257 * 128;
    let top = 3457 * 1024 + 1025 * 1024 + 1025 * 512 + 513 * 256 + 257;
    let cross = 3 * (3456 * 512 + 512 * 3456 + 3456);
    assert_eq!(count.dense, bottom + top + cross);
    assert_eq!(count.dense / 10_000, 1_604);
}

#[test]
fn precisions_without_a_gain_on_the_processor_are_refused() {
    let with = |name: &str| {
        let text = WHOLE.replace("epochs = 1", &format!("epochs = 1\nprecision = \"{name}\""));
        TrainConfig::parse(Path::new("train.toml"), &text)
    };
    let precisions = [("fp32", Precision::Fp32), ("tf32", Precision::Tf32), ("bf16", Precision::Bf16)];
    for (name, precision) in precisions {
        assert_eq!(with(name).unwrap().train.precision, precision);
    }
    assert!(with("fp16").unwrap_err().to_string().contains("fp16"));
    Precision::Fp32.check_on_processor(false).unwrap();
    let (message, hint) = Precision::Tf32.check_on_processor(true).unwrap_err();
    assert!(message.contains("`tf32`") && hint.to_string().contains("GPU"), "{message}: {hint}");
    let (message, hint) = Precision::Bf16.check_on_processor(false).unwrap_err();
    assert!(message.contains("AVX-512 BF16") && hint.to_string().contains("`fp32`"), "{message}: {hint}");
    Precision::Bf16.check_on_processor(true).unwrap();
}
