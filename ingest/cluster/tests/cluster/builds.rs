//! A build on a cluster of any size writes the same dataset as a build in one process.

use onefold_tests::{Dir, S3Server};

use crate::fleet::{Fleet, contents};

/// Returns logs of a workload, and the dataset that one process builds from them.
fn built_here(workload: &str, samples: usize) -> Dir {
    Dir::made_once(&format!("{workload} {samples}"), |dir| {
        dir.command(&format!(
            "onefold-data generate --workload {workload} --samples {samples} --seed 3 --out logs"
        ))
        .works();
        dir.command("onefold-ingest build logs/dataset.toml --buckets 5 --out here --threads 2").works();
    })
}

/// Builds the dataset on a cluster, and compares it byte by byte with the dataset of one process.
fn builds_the_same(dir: &Dir, executors: usize) {
    let fleet = Fleet::new(dir, executors);
    let summary =
        fleet.command(&format!("build logs/dataset.toml --buckets 5 --out there{executors}")).json();
    let here = dir.command("onefold-ingest verify here").json();
    assert_eq!(summary["samples"], here["samples"]);
    let there = format!("there{executors}");
    assert_eq!(contents(&dir.path(&there)), contents(&dir.path("here")), "{executors} executors");
    assert!(!dir.path(format!("{there}/work")).exists(), "rows are left in the work folder");
    dir.command(&format!("onefold-ingest verify {there}")).works();
}

#[test]
fn one_two_and_three_executors_build_what_one_process_builds() {
    let dir = built_here("rm1", 3000);
    (1..=3).for_each(|executors| builds_the_same(&dir, executors));
}

#[test]
fn every_workload_is_built() {
    for workload in ["rm2", "rm3"] {
        builds_the_same(&built_here(workload, 3000), 2);
    }
}

#[test]
fn logs_and_datasets_may_be_in_an_object_store() {
    let (dir, server) = (built_here("rm1", 2000), S3Server::start());
    for (name, bytes) in onefold_tests::files_below(&dir.path("logs")) {
        server.put("logs", name.to_str().unwrap(), bytes);
    }
    let text = dir.text("logs/dataset.toml").replace("path = \"", "path = \"s3://logs/");
    let paths = text.lines().map(|line| match line.split_once(" = \"") {
        Some((name, file)) if file.ends_with(".parquet\"") => format!("{name} = \"s3://logs/{file}\n"),
        _ => format!("{line}\n"),
    });
    dir.write("dataset.toml", paths.collect::<String>());
    let fleet = Fleet::with(&dir, 2, Some(&server), "");
    let summary = fleet.command("build dataset.toml --buckets 5 --out s3://logs/built").json();
    assert!(summary["samples"].as_u64() > Some(1000), "{summary}");
    let built = server.file("logs", "built");
    assert_eq!(contents(&built), contents(&dir.path("here")));
    // These builds put records and vocabularies into the work folder.
    for config in ["dataset.toml", "logs/dataset.toml"] {
        dir.edit(config, "item_00 = {", "item_00 = { vocabulary = \"frequency\",");
    }
    dir.command("onefold-ingest build logs/dataset.toml --buckets 5 --groups auto --out found").works();
    let build = "build dataset.toml --buckets 5 --groups auto --out s3://logs/found";
    let summary = fleet.command(build).json();
    assert!(summary["vocabularies"]["item_00"].as_u64() > Some(100), "{summary}");
    let found = server.file("logs", "found");
    assert_eq!(contents(&found), contents(&dir.path("found")));
    let mut files = onefold_tests::files_below(&found).into_keys();
    assert_eq!(files.find(|name| name.starts_with("work")), None, "rows are left in the work folder");
}

#[test]
fn partitions_are_appended_and_nothing_is_appended_twice() {
    let dir = built_here("rm1", 2000);
    let fleet = Fleet::new(&dir, 2);
    // The first append creates the dataset, with the number of buckets in the configuration.
    dir.edit("logs/dataset.toml", "format_version = 1\n", "format_version = 1\n\n[dataset]\nbuckets = 5\n");
    let first = fleet.command("append logs/dataset.toml --out there").json();
    assert_eq!((&first["changed"], &first["snapshot"]), (&true.into(), &1.into()));
    assert_eq!(contents(&dir.path("there")), contents(&dir.path("here")));
    let again = fleet.command("append logs/dataset.toml --out there").json();
    assert_eq!((&again["changed"], &again["snapshot"]), (&false.into(), &1.into()));
    dir.command("onefold-ingest verify there").works();
}

#[test]
fn errors_of_the_client_are_reported_before_any_work() {
    let dir = built_here("rm1", 500);
    let fleet = Fleet::new(&dir, 1);
    fleet.command("build logs/dataset.toml --out here").fails(&["here` already exists", "--overwrite"]);
    fleet.command("build logs/nothing.toml --out there").fails(&["nothing.toml"]);
}

#[test]
fn the_scheduler_reports_its_jobs() {
    let dir = built_here("rm1", 500);
    let fleet = Fleet::new(&dir, 1);
    fleet.command("build logs/dataset.toml --buckets 5 --out there").json();
    let (executors, jobs, metrics) =
        (fleet.get("/api/executors"), fleet.get("/api/jobs"), fleet.get("/api/metrics"));
    assert!(executors.contains("\"vcores\":1"), "{executors}");
    assert!(jobs.contains("\"Completed\""), "{jobs}");
    assert!(metrics.contains("job_completed_total 1"), "{metrics}");
}
