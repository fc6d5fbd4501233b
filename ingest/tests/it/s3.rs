//! Logs in an S3-compatible server, which the tests serve over HTTP on the loopback interface. It checks signatures.

use std::net::TcpListener;
use std::process::Command;
use std::time::{Duration, Instant};

use onefold_tests::{Counters, Fault, S3Server, SECRET_KEY, When};

use crate::logs::{Dir, ROWS, SELECT, columns, compressed, csv, expected, json_lines, parquet, rows};

/// Returns the sections of a configuration with the source `source` in a server.
pub(crate) fn sources(server: &S3Server, source: &str) -> String {
    let store = format!("endpoint = \"{}\"\nallow_http = true\nregion = \"us-east-1\"", server.url());
    format!("[sources]\nlog = {source}\n[object_stores.s3]\n{store}")
}

/// Returns the command of a build with credentials.
pub(crate) fn program(dir: &Dir, out: &str, secret: &str) -> Command {
    let mut command = dir.program(out);
    command.env("AWS_ACCESS_KEY_ID", onefold_tests::ACCESS_KEY).env("AWS_SECRET_ACCESS_KEY", secret);
    command.env("NO_PROXY", "127.0.0.1").env("no_proxy", "127.0.0.1");
    command
}

#[test]
fn logs_in_a_bucket_give_the_same_dataset() {
    let expected = expected();
    let dir = Dir::new();
    let server = S3Server::start();
    for (part, rows) in rows().chunks(10).enumerate() {
        let folder = format!("events/day={part}");
        server.put("logs", &format!("{folder}/a.parquet"), parquet(columns(rows)));
        server.put("logs", &format!("{folder}/_SUCCESS"), "x");
        server.put("logs", &format!("{folder}/a.json.gz"), compressed(json_lines(rows), "gz"));
    }
    let json = "{ path = \"s3://logs/**/*.json.gz\", schema = { time = \"TIMESTAMP\" } }";
    let cases = [
        "\"s3://logs/events/day=*/*.parquet\"",
        "{ path = [\"s3://logs/events/day=3/a.parquet\", \"s3://logs/events/day=[0-2]/a.parquet\"] }",
        json,
    ];
    for (case, source) in cases.iter().enumerate() {
        dir.configure(&sources(&server, source), SELECT);
        let out = format!("dataset-{case}");
        let (summary, files) = dir.works(program(&dir, &out, SECRET_KEY), &out);
        assert!(files == expected, "{source} differs");
        assert_eq!(summary["samples"], ROWS);
    }
    // The file is larger than three requests read.
    let lines = json_lines(&rows()).repeat(2000);
    assert!(lines.len() > 9 << 20);
    server.put("logs", "large/a.json", lines);
    let large = "{ path = \"s3://logs/large\", schema = { time = \"TIMESTAMP\" } }";
    dir.configure(&sources(&server, large), SELECT);
    let (summary, _) = dir.works(program(&dir, "dataset-large", SECRET_KEY), "dataset-large");
    assert_eq!(summary["samples"], 2000 * ROWS);
    // A folder whose subfolders become columns.
    dir.configure(&sources(&server, "{ path = \"s3://logs/events/\", format = \"parquet\" }"), SELECT);
    dir.fails_as(program(&dir, "failed", SECRET_KEY), &["s3://logs/events/day=0/a.json.gz", "compression"]);
    for part in 0..4 {
        fs_err::remove_file(server.file("logs", &format!("events/day={part}/a.json.gz"))).unwrap();
    }
    dir.configure(&sources(&server, "\"s3://logs/events/\""), &format!("{SELECT} WHERE day = '2'"));
    let (summary, _) = dir.works(program(&dir, "dataset-day", SECRET_KEY), "dataset-day");
    assert_eq!(summary["samples"], 10);
}

#[test]
fn objects_that_are_damaged_are_named() {
    let dir = Dir::new();
    let server = S3Server::start();
    let whole = parquet(columns(&rows()));
    let mut holed = whole.clone();
    holed[4..200].fill(0xff);
    server.put("logs", "holed/a.parquet", &holed);
    server.put("logs", "cut/a.parquet", &whole[..whole.len() / 2]);
    let lines = compressed(json_lines(&rows()).repeat(1000), "zst");
    server.put("logs", "packed/a.json.zst", &lines[..lines.len() - 9]);
    for (path, parts) in [
        ("holed", ["s3://logs/holed/a.parquet", "it cannot be decoded"]),
        ("cut", ["s3://logs/cut/a.parquet", "not a whole Parquet file"]),
        ("packed", ["s3://logs/packed/a.json.zst", "it cannot be"]),
    ] {
        let types = if path == "packed" { ", schema = { time = \"TIMESTAMP\" }" } else { "" };
        dir.configure(&sources(&server, &format!("{{ path = \"s3://logs/{path}/*\"{types} }}")), SELECT);
        dir.fails_as(program(&dir, "failed", SECRET_KEY), &parts);
    }
}

#[test]
fn credentials_may_come_from_a_profile_of_aws() {
    let dir = Dir::new();
    let server = S3Server::start();
    server.put("logs", "a.parquet", parquet(columns(&rows())));
    dir.configure(&sources(&server, "\"s3://logs/*.parquet\""), SELECT);
    let keys = |key: &str| {
        format!("aws_access_key_id = {}\naws_secret_access_key = {key}\n", onefold_tests::ACCESS_KEY)
    };
    dir.write(".aws/credentials", format!("[default]\n{}[wrong]\n{}", keys(SECRET_KEY), keys("another")));
    let program = |out: &str| {
        let mut command = dir.program(out);
        command.env("HOME", dir.path("")).env("NO_PROXY", "127.0.0.1").env("no_proxy", "127.0.0.1");
        command
    };
    assert_eq!(dir.works(program("dataset"), "dataset").0["samples"], ROWS);
    let mut wrong = program("failed");
    wrong.env("AWS_PROFILE", "wrong");
    dir.fails_as(wrong, &["source `log`", "denied the request", "AWS_PROFILE"]);
    let mut missing = program("failed");
    missing.env("AWS_PROFILE", "nobody");
    dir.fails_as(missing, &["source `log`", "AWS_PROFILE is `nobody`", "`default`, `wrong`"]);
}

#[test]
fn stores_that_do_not_answer_are_told_apart() {
    let dir = Dir::new();
    let server = S3Server::start();
    server.put("logs", "a.parquet", parquet(columns(&rows())));
    let all = "\"s3://logs/*.parquet\"";
    dir.configure(&sources(&server, all), SELECT);
    dir.fails_as(
        program(&dir, "failed", "another secret"),
        &["source `log`", "`s3://logs/*.parquet`", "denied the request", "AWS_SECRET_ACCESS_KEY"],
    );
    // No source of credentials is reachable.
    let mut bare = dir.program("failed");
    bare.env("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1").env("NO_PROXY", "127.0.0.1");
    // Hide the profile of the user who runs the tests.
    bare.env("HOME", dir.path(""));
    dir.fails_as(bare, &["there are no credentials", "AWS_ACCESS_KEY_ID"]);
    dir.configure(&(sources(&server, all) + "\nanonymous = true"), SELECT);
    dir.fails_as(dir.program("failed"), &["denied the request", "AWS_ACCESS_KEY_ID"]);
    let with_key = sources(&server, all) + "\nsecret_access_key = \"a secret\"";
    dir.configure(&with_key, SELECT);
    dir.fails_as(dir.program("failed"), &["`secret_access_key`", "in the environment"]);
    dir.configure(&sources(&server, "\"s3://lgos/*.parquet\""), SELECT);
    dir.fails_as(program(&dir, "failed", SECRET_KEY), &["no such bucket", "`[object_stores."]);
    for nothing in ["s3://logs/nowhere/", "s3://logs/*.csv", "s3://logs/a.csv"] {
        dir.configure(&sources(&server, &format!("\"{nothing}\"")), SELECT);
        dir.fails_as(program(&dir, "failed", SECRET_KEY), &[nothing, "there is no such file"]);
    }
    // A server that is down, and one that accepts connections but never answers.
    let down = sources(&server, all);
    drop(server);
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let mute = format!(
        "[sources]\nlog = {all}\n[object_stores.\"s3://logs\"]\nendpoint = \"http://{}\"\nallow_http = true",
        silent.local_addr().unwrap()
    );
    for sources in [down, mute] {
        let started = Instant::now();
        dir.configure(&sources, SELECT);
        dir.fails_as(program(&dir, "failed", SECRET_KEY), &["cannot be reached", "`endpoint`"]);
        assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
    }
}

/// Serves the log as Parquet in `pages/`, as CSV in `text/` and as compressed JSON in `packed/`. Returns a folder, and
/// the source and query of each format.
fn served() -> (Dir, S3Server, [(&'static str, String, &'static str); 3]) {
    let (dir, server) = (Dir::new(), S3Server::start());
    for (part, rows) in rows().chunks(10).enumerate() {
        server.put("logs", &format!("pages/{part}.parquet"), parquet(columns(rows)));
        server.put("logs", &format!("text/{part}.csv"), csv(rows, ',', true));
        server.put("logs", &format!("packed/{part}.json.zst"), compressed(json_lines(rows), "zst"));
    }
    let time = "schema = { time = \"TIMESTAMP\" }";
    let cases = [
        ("pages", "\"s3://logs/pages/*\"".to_owned(), SELECT),
        ("text", format!("{{ path = \"s3://logs/text/*\", {time} }}"), crate::logs::SELECT_TEXT),
        ("packed", format!("{{ path = \"s3://logs/packed/*\", {time} }}"), SELECT),
    ];
    (dir, server, cases)
}

#[test]
fn transient_failures_are_retried_request_by_request() {
    let expected = expected();
    let (dir, server, cases) = served();
    for (name, source, query) in &cases {
        dir.configure(&sources(&server, source), query);
        server.heal();
        server.reset_counters();
        let (_, files) =
            dir.works(program(&dir, &format!("{name}-calm"), SECRET_KEY), &format!("{name}-calm"));
        assert!(files == expected, "{name}");
        let calm = server.counters();
        assert_eq!(calm.faults, 0);
        for (fault, when) in [
            (Fault::SlowDown, When::First(2)),
            (Fault::InternalError, When::Nth(3)),
            (Fault::Reset, When::Nth(4)),
            (Fault::LoseAnswer, When::Nth(5)),
            (Fault::Truncate, When::Nth(3)),
            (Fault::Slow { bytes_per_second: 20_000 }, When::Nth(2)),
        ] {
            server.heal();
            server.reset_counters();
            server.inject("GET /logs/", fault, when);
            let out = format!("{name}-{fault:?}-{when:?}").replace([' ', '{', '}', ':', '(', ')'], "");
            let (_, files) = dir.works(program(&dir, &out, SECRET_KEY), &out);
            assert!(files == expected, "{name} {fault:?}");
            let Counters { faults, gets, lists, .. } = server.counters();
            assert!(faults > 0, "{name} {fault:?}: no request had the fault");
            // Failed requests are sent again, but no file is read again from the beginning. Two scans may request the
            // same footer.
            let most = (calm.gets + calm.lists) * 3 / 2 + faults;
            assert!(gets + lists <= most, "{name} {fault:?}: {gets} + {lists} requests, {most} expected");
        }
        server.heal();
        server.delay(Duration::from_millis(20));
        server.inject("GET /logs/", Fault::SlowDown, When::Chance { probability: 0.1, seed: 7 });
        let out = format!("{name}-busy");
        let (_, files) = dir.works(program(&dir, &out, SECRET_KEY), &out);
        assert!(files == expected, "{name} busy");
    }
}

#[test]
fn a_failure_that_stays_names_the_object_and_reads_nothing_again() {
    let (dir, server, cases) = served();
    for (name, source, query) in &cases {
        dir.configure(&sources(&server, source), query);
        server.heal();
        server.reset_counters();
        let calm = format!("calm-{name}");
        dir.works(program(&dir, &calm, SECRET_KEY), &calm);
        let calm = server.counters();
        let ending = match *name {
            "pages" => "parquet",
            "text" => "csv",
            _ => "json.zst",
        };
        // The footer or the first rows can be read; then the object is deleted.
        let object = format!("{name}/2.{ending}");
        let path = server.file("logs", &object);
        let bytes = fs_err::read(&path).unwrap();
        server.reset_counters();
        let gone = path.clone();
        server.before(&format!("GET /logs/{object}"), 2, move || fs_err::remove_file(gone).unwrap());
        let file = format!("s3://logs/{object}");
        dir.fails_as(program(&dir, "failed", SECRET_KEY), &["source `log`", &file, "no such object"]);
        let counted = server.counters();
        assert!(counted.gets <= calm.gets, "{counted:?}; a build that succeeds: {calm:?}");
        server.put("logs", &object, bytes);
    }
}

#[test]
fn an_object_that_changes_while_it_is_read_is_an_error() {
    let (dir, server, cases) = served();
    for (name, source, query) in &cases {
        dir.configure(&sources(&server, source), query);
        let ending = match *name {
            "pages" => "parquet",
            "text" => "csv",
            _ => "json.zst",
        };
        // An object of the same size replaces the first one before it is read for the second time.
        let object = format!("{name}/1.{ending}");
        let bytes = fs_err::read(server.file("logs", &object)).unwrap();
        let mut other = bytes.clone();
        let middle = other.len() / 2;
        other[middle] ^= 1;
        let (writer, key) = (server.writer(), object.clone());
        server.heal();
        server.before(&format!("GET /logs/{object}"), 2, move || writer.put("logs", &key, other));
        let file = format!("s3://logs/{object}");
        dir.fails_as(
            program(&dir, "failed", SECRET_KEY),
            &["source `log`", &file, "it was changed while it was read", "run this again"],
        );
        server.put("logs", &object, bytes);
    }
}
