use std::path::Path;

use serde_json::Value;

use super::*;
use crate::Error;
use crate::embedding::SentBytes;

/// Two steps of rank 0, and one of rank 1, whose first step takes longer.
const RANKS: [&str; 2] = [
    concat!(
        r#"{"step":7,"rank":0,"ranks":2,"began_micros":1000000,"length_micros":9000,"#,
        r#""sent_bytes":{"requests":100,"answers":2000,"gradients":2000,"dense":400},"spans":["#,
        r#"{"name":"forward","start_micros":0,"end_micros":2000},{"name":"answers","start_micros":2000,"end_micros":3500},"#,
        r#"{"name":"backward","start_micros":3500,"end_micros":7000},{"name":"losses","start_micros":7000,"end_micros":8900}]}"#,
        "\n",
        r#"{"step":8,"rank":0,"ranks":2,"began_micros":1010000,"length_micros":5000,"#,
        r#""sent_bytes":{"requests":0,"answers":0,"gradients":0,"dense":400},"spans":["#,
        r#"{"name":"input","start_micros":1000,"end_micros":5000}]}"#,
        "\n"
    ),
    concat!(
        r#"{"step":7,"rank":1,"ranks":2,"began_micros":1000100,"length_micros":9100,"#,
        r#""sent_bytes":{"requests":100,"answers":4000,"gradients":4000,"dense":400},"spans":["#,
        r#"{"name":"update","start_micros":0,"end_micros":9100}]}"#,
        "\n"
    ),
];

/// Creates a run whose ranks have timeline files with these contents.
fn run(ranks: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join(timeline::DIRECTORY);
    fs_err::create_dir(&directory).unwrap();
    for (rank, text) in ranks.iter().enumerate() {
        fs_err::write(directory.join(format!("rank-{rank:05}.jsonl")), text).unwrap();
    }
    folder
}

fn load(ranks: &[&str]) -> Timeline {
    Timeline::load(run(ranks).path()).unwrap()
}

#[test]
fn loading_restores_written_timelines() {
    let timeline = load(&RANKS);
    let places: Vec<_> = timeline.steps.iter().map(|step| (step.step, step.rank)).collect();
    assert_eq!((timeline.ranks, places), (2, vec![(7, 0), (7, 1), (8, 0)]));
    let mut files = [Vec::new(), Vec::new()];
    for step in &timeline.steps {
        step.write(&mut files[step.rank as usize]).unwrap();
    }
    assert_eq!(files.map(|file| String::from_utf8(file).unwrap()), RANKS);
}

#[test]
fn ranks_are_compared() {
    let timeline = load(&RANKS);
    let ranks = timeline.by_rank();
    assert_eq!((ranks[0].steps, ranks[1].steps), (2, 1));
    assert_eq!(ranks[0].times_ms, [2.75, 0.75, 0.95, 2.0]);
    assert_eq!(ranks[1].times_ms, [9.1, 0.0, 0.0, 0.0]);
    assert_eq!(ranks[0].sent_bytes, SentBytes { requests: 50, answers: 1000, gradients: 1000, dense: 400 });
    let times = timeline.times();
    assert_eq!(times.compute_ms, OverRanks { mean: 5.925, max: 9.1, max_rank: 1 });
    assert_eq!(times.waiting_ms, OverRanks { mean: 1.0, max: 2.0, max_rank: 0 });
    // A rank that was killed before its first traced step does not contribute to the mean.
    let times = load(&["", RANKS[1]]).times();
    assert_eq!(times.compute_ms, OverRanks { mean: 9.1, max: 9.1, max_rank: 1 });
}

#[test]
fn perfetto_gets_a_process_for_each_rank() {
    let trace: Value = serde_json::from_str(&load(&RANKS).chrome()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let named: Vec<_> = events.iter().filter(|event| event["name"] == "process_name").collect();
    assert_eq!(named[1]["args"]["name"], "rank 1");
    let complete: Vec<String> = events
        .iter()
        .filter(|event| event["ph"] == "X")
        .map(|event| {
            let text = |key: &str| event[key].as_str().unwrap().to_owned();
            format!("{} {} {}+{} {}", event["pid"], text("name"), event["ts"], event["dur"], text("cat"))
        })
        .collect();
    assert_eq!(
        complete,
        [
            "0 step 7 0+9000 step",
            "0 forward 0+2000 compute",
            "0 answers 2000+1500 exchange",
            "0 backward 3500+3500 compute",
            "0 losses 7000+1900 all_reduce",
            "1 step 7 100+9100 step",
            "1 update 100+9100 compute",
            "0 step 8 10000+5000 step",
            "0 input 11000+4000 waiting",
        ]
    );
}

/// Returns the rectangles of a page: class, x, y, width, title.
fn rectangles(page: &str) -> Vec<String> {
    let attribute = |rect: &str, name: &str| {
        let (_, rest) = rect.split_once(&format!(" {name}=\"")).unwrap();
        rest.split_once('"').unwrap().0.to_owned()
    };
    let rect = |rect: &str| {
        let [class, x, y, width] = ["class", "x", "y", "width"].map(|name| attribute(rect, name));
        let title = rect.split_once("<title>").unwrap().1.split_once("</title>").unwrap().0;
        format!("{class} {x} {y} {width} | {title}").replace('\u{202F}', " ")
    };
    page.split("<rect").skip(1).map(rect).collect()
}

#[test]
fn a_page_has_a_lane_for_each_rank() {
    let page = load(&RANKS).html("runs/<1>");
    assert!(page.contains("<h1>Ranks of runs/&lt;1&gt;</h1>"));
    assert!(page.contains("2 steps of 2 ranks, from step 7 to 8 · rank 1 has 1 of them"), "{page}");
    // In the overview, 15 ms have a width of 960 pixels.
    let rectangles = rectangles(&page);
    assert_eq!(
        rectangles[..8],
        [
            "compute 66.0 20.0 128.0 | forward: 2.00 ms, from 0.00 ms on (rank 0, step 7)",
            "exchange 194.0 20.0 96.0 | waits for answers: 1.50 ms, from 2.00 ms on (rank 0, step 7)",
            "compute 290.0 20.0 224.0 | backward: 3.50 ms, from 3.50 ms on (rank 0, step 7)",
            "all_reduce 514.0 20.0 121.6 | waits for losses: 1.90 ms, from 7.00 ms on (rank 0, step 7)",
            "border 65.2 18.0 1.6 | rank 0, step 7: 9.00 ms; sent 100 B requests, 2.0 KiB answers, 2.0 KiB gradients, 400 B dense",
            "compute 72.4 46.0 582.4 | update: 9.10 ms, from 0.00 ms on (rank 1, step 7)",
            "border 71.6 44.0 1.6 | rank 1, step 7: 9.10 ms; sent 100 B requests, 3.9 KiB answers, 3.9 KiB gradients, 400 B dense",
            "waiting 770.0 20.0 256.0 | waits for input: 4.00 ms, from 1.00 ms on (rank 0, step 8)",
        ]
    );
    // Each step is drawn again, in its own picture.
    assert_eq!(rectangles.len(), 2 * 9);
    assert!(page.contains("<h3>Step 8 <span>5.00\u{202F}ms</span></h3>"), "{page}");
}

/// A page contains only finite numbers, whatever the times are.
#[test]
fn pages_of_odd_timelines_have_numbers_only() {
    let instant = RANKS[1].replace("9100", "0").replace("\"rank\":1", "\"rank\":0");
    let far = RANKS[1].replace("1000100", "4000000000000000");
    for ranks in [vec![instant.as_str()], vec![RANKS[0], &far], vec![RANKS[0]]] {
        let page = load(&ranks).html("run");
        assert!(!page.contains("NaN") && !page.contains("inf"), "{page}");
    }
}

#[test]
fn damaged_timelines_are_refused() {
    let error = |ranks: &[&str]| match Timeline::load(run(ranks).path()) {
        Err(Error::Run(fault)) => {
            let text = fault.message.to_string();
            let (path, message) = text.split_once("`: ").unwrap();
            (Path::new(path).file_name().unwrap().to_owned(), message.to_owned())
        }
        other => panic!("{other:?}"),
    };
    let truncated = &RANKS[0][..RANKS[0].len() - 20];
    let (file, message) = error(&[truncated]);
    assert_eq!(file, "rank-00000.jsonl");
    assert!(message.starts_with("line 2 is damaged: "), "{message}");
    let line = RANKS[1].trim_end();
    for (from, to, expected) in [
        ("\"step\":7", "\"stop\":7", "unknown field `stop`"),
        ("\"rank\":1", "\"rank\":2", "it is of rank 2"),
        ("\"ranks\":2", "\"ranks\":1", "there is no rank 1 among 1 ranks"),
        ("1000100", "18446744073709551615", "its time is out of range"),
        ("9100}]", "9200}]", "a span ends at 9200 µs, and the step at 9100 µs"),
        ("\"start_micros\":0", "\"start_micros\":9900", "the span that starts at 9900 µs overlaps another"),
        ("update", "rest", "unknown variant `rest`"),
    ] {
        let (_, message) = error(&[RANKS[0], &line.replace(from, to)]);
        assert!(message.starts_with("line 1 is damaged: ") && message.contains(expected), "{message}");
    }
    let (_, message) = error(&[RANKS[0], &format!("{line}\n{line}\n")]);
    assert_eq!(message, "line 2 is damaged: step 7 comes twice");
    let (_, message) = error(&[RANKS[0], &RANKS[1].replace("\"ranks\":2", "\"ranks\":3")]);
    assert_eq!(message, "`rank-00000.jsonl` is of a job of 2 ranks, and `rank-00001.jsonl` of one of 3");
}

#[test]
fn a_run_without_a_timeline_says_how_to_get_one() {
    let folder = tempfile::tempdir().unwrap();
    let error = Timeline::load(folder.path()).unwrap_err().to_string();
    assert!(error.contains("not a run"), "{error}");
    let missing = Timeline::load(Path::new("/no/such/run")).unwrap_err().to_string();
    assert!(missing.contains("not a run"), "{missing}");
}

#[test]
fn files_of_ranks_that_no_longer_exist_are_removed() {
    let folder = run(&[RANKS[0], RANKS[1]]);
    let directory = folder.path().join(timeline::DIRECTORY);
    let names = || {
        let entries = fs_err::read_dir(&directory).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    drop(timeline::create(&directory, 1, 2).unwrap());
    assert_eq!(names(), ["rank-00000.jsonl", "rank-00001.jsonl"]);
    drop(timeline::create(&directory, 0, 1).unwrap());
    assert_eq!(names(), ["rank-00000.jsonl"]);
}
