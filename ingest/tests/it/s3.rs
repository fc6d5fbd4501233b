//! Logs in an S3-compatible server, which this test serves over HTTP on the loopback interface, with signatures checked.

use std::net::TcpListener;
use std::process::Command;
use std::time::{Duration, Instant};

use hyper_util::rt::TokioIo;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use s3s_fs::FileSystem;
use tokio::runtime::Runtime;

use crate::logs::{Dir, ROWS, SELECT, columns, compressed, expected, json_lines, parquet, rows};

/// A server that runs until it is dropped. Its buckets are the folders of `buckets`.
struct Server {
    url: String,
    runtime: Option<Runtime>,
}

impl Server {
    fn start(dir: &Dir) -> Self {
        fs_err::create_dir_all(dir.path("buckets/logs")).unwrap();
        let mut builder = S3ServiceBuilder::new(FileSystem::new(dir.path("buckets")).unwrap());
        builder.set_auth(SimpleAuth::from_single("reader", "a secret"));
        let service = builder.build();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            while let Ok((stream, _)) = listener.accept().await {
                let connection = hyper::server::conn::http1::Builder::new();
                let connection = connection.serve_connection(TokioIo::new(stream), service.clone());
                tokio::spawn(connection);
            }
        });
        Self { url, runtime: Some(runtime) }
    }

    /// The sections of a configuration whose source is `path` in this server.
    fn sources(&self, source: &str) -> String {
        let store = format!("endpoint = \"{}\"\nallow_http = true\nregion = \"us-east-1\"", self.url);
        format!("[sources]\nlog = {source}\n[object_stores.s3]\n{store}")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.runtime.take().unwrap().shutdown_background();
    }
}

/// The program with credentials.
fn program(dir: &Dir, out: &str, secret: &str) -> Command {
    let mut command = dir.program(out);
    command.env("AWS_ACCESS_KEY_ID", "reader").env("AWS_SECRET_ACCESS_KEY", secret);
    command.env("NO_PROXY", "127.0.0.1").env("no_proxy", "127.0.0.1");
    command
}

#[test]
fn logs_in_a_bucket_give_the_same_dataset() {
    let expected = expected();
    let dir = Dir::new();
    let server = Server::start(&dir);
    for (part, rows) in rows().chunks(10).enumerate() {
        let folder = format!("buckets/logs/events/day={part}");
        dir.write(format!("{folder}/a.parquet"), parquet(columns(rows)));
        dir.write(format!("{folder}/_SUCCESS"), "x");
        dir.write(format!("{folder}/a.json.gz"), compressed(json_lines(rows), "gz"));
    }
    let json = "{ path = \"s3://logs/**/*.json.gz\", schema = { time = \"TIMESTAMP\" } }";
    let sources = [
        "\"s3://logs/events/day=*/*.parquet\"",
        "{ path = [\"s3://logs/events/day=3/a.parquet\", \"s3://logs/events/day=[0-2]/a.parquet\"] }",
        json,
    ];
    for (case, source) in sources.iter().enumerate() {
        dir.configure(&server.sources(source), SELECT);
        let out = format!("dataset-{case}");
        let (summary, files) = dir.works(program(&dir, &out, "a secret"), &out);
        assert!(files == expected, "{source} differs");
        assert_eq!(summary["samples"], ROWS);
    }
    // More than three requests take.
    let lines = json_lines(&rows()).repeat(2000);
    assert!(lines.len() > 9 << 20);
    dir.write("buckets/logs/large/a.json", lines);
    let large = "{ path = \"s3://logs/large\", schema = { time = \"TIMESTAMP\" } }";
    dir.configure(&server.sources(large), SELECT);
    let (summary, _) = dir.works(program(&dir, "dataset-large", "a secret"), "dataset-large");
    assert_eq!(summary["samples"], 2000 * ROWS);
    // A directory, of which the folders are columns.
    dir.configure(&server.sources("{ path = \"s3://logs/events/\", format = \"parquet\" }"), SELECT);
    dir.fails_as(program(&dir, "failed", "a secret"), &["s3://logs/events/day=0/a.json.gz", "compression"]);
    for part in 0..4 {
        fs_err::remove_file(dir.path(format!("buckets/logs/events/day={part}/a.json.gz"))).unwrap();
    }
    dir.configure(&server.sources("\"s3://logs/events/\""), &format!("{SELECT} WHERE day = '2'"));
    let (summary, _) = dir.works(program(&dir, "dataset-day", "a secret"), "dataset-day");
    assert_eq!(summary["samples"], 10);
}

#[test]
fn objects_that_are_damaged_are_named() {
    let dir = Dir::new();
    let server = Server::start(&dir);
    let whole = parquet(columns(&rows()));
    let mut holed = whole.clone();
    holed[4..200].fill(0xff);
    dir.write("buckets/logs/holed/a.parquet", &holed);
    dir.write("buckets/logs/cut/a.parquet", &whole[..whole.len() / 2]);
    let lines = compressed(json_lines(&rows()).repeat(1000), "zst");
    dir.write("buckets/logs/packed/a.json.zst", &lines[..lines.len() - 9]);
    for (path, parts) in [
        ("holed", ["s3://logs/holed/a.parquet", "it cannot be decoded"]),
        ("cut", ["s3://logs/cut/a.parquet", "not a whole Parquet file"]),
        ("packed", ["s3://logs/packed/a.json.zst", "it cannot be"]),
    ] {
        let types = if path == "packed" { ", schema = { time = \"TIMESTAMP\" }" } else { "" };
        dir.configure(&server.sources(&format!("{{ path = \"s3://logs/{path}/*\"{types} }}")), SELECT);
        dir.fails_as(program(&dir, "failed", "a secret"), &parts);
    }
}

#[test]
fn stores_that_do_not_answer_are_told_apart() {
    let dir = Dir::new();
    let server = Server::start(&dir);
    dir.write("buckets/logs/a.parquet", parquet(columns(&rows())));
    let all = "\"s3://logs/*.parquet\"";
    dir.configure(&server.sources(all), SELECT);
    dir.fails_as(
        program(&dir, "failed", "another secret"),
        &["source `log`", "`s3://logs/*.parquet`", "denied the request", "AWS_SECRET_ACCESS_KEY"],
    );
    // Nowhere to get credentials from.
    let mut bare = dir.program("failed");
    bare.env("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1").env("NO_PROXY", "127.0.0.1");
    dir.fails_as(bare, &["there are no credentials", "AWS_ACCESS_KEY_ID"]);
    dir.configure(&(server.sources(all) + "\nanonymous = true"), SELECT);
    dir.fails_as(dir.program("failed"), &["denied the request", "AWS_ACCESS_KEY_ID"]);
    let with_key = server.sources(all) + "\nsecret_access_key = \"a secret\"";
    dir.configure(&with_key, SELECT);
    dir.fails_as(dir.program("failed"), &["`secret_access_key`", "in the environment"]);
    dir.configure(&server.sources("\"s3://lgos/*.parquet\""), SELECT);
    dir.fails_as(program(&dir, "failed", "a secret"), &["no such bucket", "`[object_stores."]);
    for nothing in ["s3://logs/nowhere/", "s3://logs/*.csv", "s3://logs/a.csv"] {
        dir.configure(&server.sources(&format!("\"{nothing}\"")), SELECT);
        dir.fails_as(program(&dir, "failed", "a secret"), &[nothing, "there is no such file"]);
    }
    // A server that is gone, and one that takes connections and says nothing.
    let down = server.sources(all);
    drop(server);
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let mute = format!(
        "[sources]\nlog = {all}\n[object_stores.\"s3://logs\"]\nendpoint = \"http://{}\"\nallow_http = true",
        silent.local_addr().unwrap()
    );
    for sources in [down, mute] {
        let started = Instant::now();
        dir.configure(&sources, SELECT);
        dir.fails_as(program(&dir, "failed", "a secret"), &["cannot be reached", "`endpoint`"]);
        assert!(started.elapsed() < Duration::from_secs(25), "{:?}", started.elapsed());
    }
}
