use onefold_datasets::Partition;

use super::follower::divide;
use super::record::{Changed, Lines};
use super::*;

fn key(text: &str) -> PartitionKey {
    PartitionKey::parse(text).unwrap()
}

fn partition(text: &str) -> Partition {
    Partition {
        key: key(text),
        samples: 1,
        sessions: 1,
        digest: Digest::default(),
        last_time: None,
        files: Vec::new(),
    }
}

#[test]
fn parts_come_in_the_order_of_time_up_to_the_last_one() {
    let partitions = [
        "region=a/date=2024-05-02/hour=00",
        "region=a/date=2024-05-01/hour=23",
        "region=b/date=2024-05-01/hour=23",
        "region=a/date=2024-05-01/hour=22",
    ]
    .map(partition);
    let pending: Vec<&Partition> = partitions.iter().collect();
    let mut followed = Followed::default();
    let found = |followed: &Followed, pending: &[&Partition], until: Option<&str>| {
        let until = until.map(|until| Day::time_of(&key(until)));
        let (days, reached) = divide(pending, followed, until.as_ref());
        (days.into_iter().map(|day| day.name).collect::<Vec<_>>(), reached)
    };
    let (first, second, third) =
        ("region=a/date=2024-05-01/hour=22", "date=2024-05-01/hour=23", "region=a/date=2024-05-02/hour=00");
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    assert_eq!(found(&followed, &pending, None), (names(&[first, second, third]), false));
    assert_eq!(found(&followed, &pending, Some("date=2024-05-01")), (names(&[first, second]), true));
    assert_eq!(found(&followed, &pending, Some("date=2024-05-01/hour=22")), (names(&[first]), true));
    assert_eq!(found(&followed, &pending, Some("date=2024-05-03")), (names(&[first, second, third]), false));
    // Partitions that have been trained on also count towards `until`.
    followed.trained.insert(first.to_owned(), Digest::default());
    assert_eq!(found(&followed, &[], Some("date=2024-05-01/hour=22")), (names(&[]), true));
    assert_eq!(found(&followed, &[], Some("date=2024-05-01/hour=23")), (names(&[]), false));
    assert_eq!(found(&followed, &[], None), (names(&[]), false));
}

#[test]
fn a_time_that_partitions_do_not_have_is_refused() {
    let config = TrainConfig::parse(
        std::path::Path::new("train.toml"),
        "format_version = 1\n[data]\nlabel = \"clicked\"\n[model]\nbottom_mlp = [4]\ntop_mlp = [4, 1]\n",
    );
    let config = config.unwrap();
    let until = |text: &str| Follow {
        min_samples: 1,
        max_wait: None,
        max_drift: None,
        late_labels: false,
        look_every: Duration::from_secs(1),
        export_every: None,
        stop_after: None,
        until: Some(key(text)),
        begun: None,
    };
    let keys = [key("region=a/date=2024-05-01/hour=23")];
    for good in ["date=2024-06-01", "date=2024-06-01/hour=00", "region=b/date=2024-06-01"] {
        check_until(&config, &until(good), &keys).unwrap();
    }
    for bad in ["hour=00", "region=a", "week=3", "date=2024-06-01/minute=00"] {
        let checked = check_until(&config, &until(bad), &keys);
        // Columns other than `date` and `hour` are ignored.
        assert_eq!(checked.is_ok(), bad.starts_with("date"), "{bad}");
    }
}

#[test]
fn a_part_that_is_done_is_known() {
    let mut followed = Followed::default();
    assert!(followed.is_nothing());
    let partitions = vec![(key("hour=01"), Digest::default())];
    let file = LabelFiles { samples: 1, labels: i64::MIN };
    let files = BTreeMap::from([("hour=01".to_owned(), file)]);
    followed.current =
        Some(Current { snapshot: 2, partitions, files, samples_before: 3, loss_bits_before: u64::MAX });
    let text = serde_json::to_string(&followed).unwrap();
    assert_eq!(serde_json::from_str::<Followed>(&text).unwrap(), followed);
    assert!(followed.is_known(&key("hour=01")) && !followed.is_known(&key("hour=02")));
    followed.end_part();
    assert!(followed.is_known(&key("hour=01")) && followed.current.is_none());
    assert_eq!((followed.before.len(), followed.trained.len()), (1, 1));
    // Labels are recomputed beside the same samples; other samples are in other files.
    assert!(followed.is_again(&[key("hour=01")]) && !followed.is_again(&[key("hour=02")]));
    let found = |samples: i64, labels: i64| LabelFiles { samples, labels }.has_new_labels(file);
    assert_eq!([found(1, i64::MIN), found(1, 2), found(2, 2)], [false, true, false]);
}

#[test]
fn lines_after_a_checkpoint_are_written_again_but_for_that_of_its_part() {
    let folder = tempfile::tempdir().unwrap();
    let text = || fs_err::read_to_string(folder.path().join("follow.jsonl")).unwrap();
    let part = |name: &str, step: u64| serde_json::json!({ "partition": name, "step": step });
    let changed = Changed { changed: "hour=00", snapshot: 3, committed: "", samples: 1 };
    let mut lines = Lines::open(folder.path(), 0).unwrap();
    let first = lines.append(&part("hour=00", 3)).unwrap();
    lines.append(&part("hour=01", 6)).unwrap();
    lines.append(&changed).unwrap();
    let whole = text();

    // Resume from the checkpoint of the second part.
    let mut lines = Lines::open(folder.path(), first).unwrap();
    let second = lines.keep("hour=01", 6).unwrap();
    assert_eq!(lines.append(&changed).unwrap(), whole.len() as u64);
    assert_eq!(text(), whole);
    // The line is not kept for another part.
    for (name, step) in [("hour=02", 6), ("hour=01", 5)] {
        assert_eq!(Lines::open(folder.path(), first).unwrap().keep(name, step), None);
    }
    assert_eq!(Lines::open(folder.path(), second).unwrap().keep("hour=00", 3), None);
    // An incomplete line is not kept.
    fs_err::write(folder.path().join("follow.jsonl"), &whole[..second as usize - 1]).unwrap();
    let mut lines = Lines::open(folder.path(), first).unwrap();
    assert_eq!(lines.keep("hour=01", 6), None);
    assert_eq!(lines.append(&part("hour=01", 6)).unwrap(), second);
    // If lines are lost, the remaining lines are kept.
    let mut lines = Lines::open(folder.path(), 10_000).unwrap();
    lines.append(&changed).unwrap();
    assert_eq!(text(), whole);
}
