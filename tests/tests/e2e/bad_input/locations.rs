//! Locations that cannot be reached, as a new user encounters them: wrong names, no credentials, no server.

use std::net::TcpListener;

use onefold_tests::{Dir, S3Server, TestCommand};

use crate::commands::dataset_commands;
use crate::logs::write_logs;
use crate::remote::SOON;

/// Returns a command whose environment contains no settings of stores except `variables`, and no proxy. Its home
/// directory has no AWS profiles. Requests for this machine's own credentials fail at once, as on a machine that has
/// none.
fn command(dir: &Dir, line: &str, location: &str, variables: &[(&str, &str)]) -> TestCommand {
    let nowhere = "127.0.0.1:1";
    let mut command = dir.command(&line.replace("DATASET", location));
    for prefix in ["AWS_", "GOOGLE_", "AZURE_"] {
        command = command.without_variables(prefix);
    }
    let (endpoint, home) = (format!("http://{nowhere}"), dir.path("").display().to_string());
    for (name, value) in [
        ("NO_PROXY", "*"),
        ("no_proxy", "*"),
        ("AWS_METADATA_ENDPOINT", &endpoint),
        ("GCE_METADATA_HOST", nowhere),
        ("GCE_METADATA_IP", nowhere),
        ("AZURE_MSI_ENDPOINT", &endpoint),
        ("HOME", &home),
    ] {
        command = command.with_variable(name, value);
    }
    variables.iter().fold(command, |command, (name, value)| command.with_variable(name, value))
}

/// Runs a command, which must fail soon with all of `parts` in its error.
#[track_caller]
fn fails_soon(command: TestCommand, parts: &[&str]) {
    command.with_time_limit(SOON).fails(parts);
}

/// The number of commands that run at the same time, chosen so that each gets enough processor time to fail soon.
const AT_ONCE: usize = 7;

/// Runs commands at the same time, because they mostly wait. Each must fail soon with all of its parts in its error.
fn all_fail_soon(mut commands: Vec<(TestCommand, Vec<String>)>) {
    while !commands.is_empty() {
        let some = commands.split_off(commands.len().saturating_sub(AT_ONCE));
        std::thread::scope(|scope| {
            for (command, parts) in some {
                scope.spawn(move || {
                    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
                    fails_soon(command, &parts);
                });
            }
        });
    }
}

fn with_logs() -> Dir {
    let dir = Dir::new();
    write_logs(&dir);
    dir
}

const KEYS: [(&str, &str); 2] = [("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret")];

#[test]
fn every_command_says_that_a_store_cannot_be_reached() {
    let dir = with_logs();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let mute = format!("http://{}", silent.local_addr().unwrap());
    let at = |line: &str, endpoint: &str, allowed: &[(&str, &str)], parts: &[&str]| {
        let variables = [&KEYS[..], &[("AWS_ENDPOINT_URL", endpoint)], allowed].concat();
        let parts = parts.iter().map(|part| (*part).to_owned()).collect::<Vec<_>>();
        (command(&dir, line, "s3://bucket/ds", &variables), parts)
    };
    let allowed = [("AWS_ALLOW_HTTP", "true")];
    let cannot_be_reached = |line: &str, endpoint: &str| {
        let cannot = format!("{endpoint} cannot be reached");
        at(line, endpoint, &allowed, &[&cannot, "AWS_ENDPOINT_URL"])
    };
    let closed = "http://127.0.0.1:1";
    let mut commands: Vec<_> = dataset_commands()
        .map(|line| {
            let (command, mut parts) = cannot_be_reached(&line, closed);
            parts.push("s3://bucket/ds".to_owned());
            (command, parts)
        })
        .collect();
    let read = "onefold-read head DATASET";
    commands.push(cannot_be_reached(read, "http://nowhere.invalid"));
    commands.push(cannot_be_reached(read, &mute));
    // Without permission, credentials are not sent over plain HTTP.
    commands.push(at(read, &mute, &[], &["s3://bucket/ds", &mute, "plain HTTP", "AWS_ALLOW_HTTP=true"]));
    all_fail_soon(commands);
}

#[test]
fn missing_credentials_are_named() {
    let dir = with_logs();
    /// A location, environment variables with their values, and parts of the error.
    type Case<'a> = (&'a str, &'a [(&'a str, &'a str)], &'a [&'a str]);
    let cases: &[Case<'_>] = &[
        ("s3://bucket/ds", &[], &["there are no credentials", "AWS_ACCESS_KEY_ID"]),
        (
            "s3://bucket/ds",
            &[("AWS_PROFILE", "nobody")],
            &["AWS_PROFILE is `nobody`", "aws configure --profile nobody"],
        ),
        ("gs://bucket/ds", &[], &["there are no credentials", "GOOGLE_APPLICATION_CREDENTIALS"]),
        (
            "az://container/ds",
            &[("AZURE_STORAGE_ACCOUNT_NAME", "account")],
            &["there are no credentials", "AZURE_STORAGE_ACCOUNT_KEY"],
        ),
        ("az://container/ds", &[], &["Account must be specified", "AZURE_STORAGE_ACCOUNT_NAME"]),
        (
            "gs://bucket/ds",
            &[("GOOGLE_APPLICATION_CREDENTIALS", "nowhere.json")],
            &["nowhere.json", "GOOGLE_APPLICATION_CREDENTIALS"],
        ),
    ];
    let mut commands = Vec::new();
    for (location, variables, parts) in cases {
        for line in ["onefold-read head DATASET", "onefold-ingest append logs/dataset.toml --out DATASET"] {
            let parts = [&[*location][..], parts].concat().into_iter().map(str::to_owned).collect();
            commands.push((command(&dir, line, location, variables), parts));
        }
    }
    all_fail_soon(commands);
}

#[test]
fn wrong_names_are_told_apart() {
    let dir = with_logs();
    let server = S3Server::start();
    for line in dataset_commands() {
        let command = |location: &str| dir.command(&line.replace("DATASET", location)).with_s3(&server);
        fails_soon(command("s3://dtaa/ds"), &["s3://dtaa/ds", "no such bucket", "bucket's name"]);
        fails_soon(command("ftp://host/ds"), &["`ftp://host/ds`", "`s3://bucket/folder`"]);
        fails_soon(command("s3:///ds"), &["s3:///ds", "`s3://bucket/folder`"]);
        if !line.contains("--out DATASET") {
            let folder = format!("file://{}", dir.path("nothing").display());
            for location in ["s3://data/ds", "nothing", folder.as_str()] {
                fails_soon(
                    command(location),
                    &[&format!("`{location}` is not a dataset"), "onefold-ingest build"],
                );
            }
        }
    }
}
