//! Tests of AWS profiles. Each case runs in a separate process with only the environment variables of the
//! case.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::{env, thread};

use onefold_base::fault::Explain;
use onefold_base::sync::locked;
use tempfile::TempDir;

use super::*;
use crate::Storage;

/// A server on the loopback interface that imitates S3, STS, SSO and the credentials service of a container.
struct Server {
    url: String,
    requests: Arc<Mutex<Vec<String>>>,
}

/// Keys in the form of STS.
const ROLE: &str = "<Credentials><AccessKeyId>ROLE</AccessKeyId><SecretAccessKey>s</SecretAccessKey>\
                    <SessionToken>of-role</SessionToken><Expiration>2199-01-01T00:00:00Z</Expiration></Credentials>";

/// Returns the answer to a request.
fn answer(request: &str) -> String {
    let sts = |action: &str| {
        format!("<{action}Response><{action}Result>{ROLE}</{action}Result></{action}Response>")
    };
    if request.contains("Action=AssumeRoleWithWebIdentity") {
        sts("AssumeRoleWithWebIdentity")
    } else if request.contains("Action=AssumeRole") {
        sts("AssumeRole")
    } else if request.starts_with("GET /federation/credentials") {
        r#"{"roleCredentials": {"accessKeyId": "SSO", "secretAccessKey": "s", "sessionToken": "of-sso", "expiration": 7226582400000}}"#.to_owned()
    } else if request.starts_with("GET /container") {
        r#"{"AccessKeyId": "CONTAINER", "SecretAccessKey": "s", "Token": "of-container", "Expiration": "2199-01-01T00:00:00Z"}"#.to_owned()
    } else {
        "<ListBucketResult><Name>b</Name><IsTruncated>false</IsTruncated></ListBucketResult>".to_owned()
    }
}

/// Reads a request: its head, and a body of the length given in the head.
fn receive(stream: &mut TcpStream) -> String {
    let (mut request, mut byte) = (Vec::new(), [0]);
    while !request.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|read| read > 0) {
        request.push(byte[0]);
    }
    let head = String::from_utf8(request).unwrap();
    let length = head
        .lines()
        .find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length:")?.trim().parse().ok());
    let mut body = vec![0; length.unwrap_or(0)];
    stream.read_exact(&mut body).unwrap();
    head + &String::from_utf8(body).unwrap()
}

impl Server {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::<Mutex<Vec<String>>>::default();
        let received = Arc::clone(&requests);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let request = receive(&mut stream);
                let body = answer(&request);
                locked(&received).push(request);
                let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close", body.len());
                stream.write_all(format!("{head}\r\n\r\n{body}").as_bytes()).unwrap();
            }
        });
        Self { url, requests }
    }
}

/// A home directory, and a server for all services.
struct Case {
    home: TempDir,
    server: Server,
}

impl Case {
    /// Creates a home directory with this `~/.aws/config`.
    fn new(config: &str) -> Self {
        let case = Self { home: TempDir::new().unwrap(), server: Server::start() };
        case.write(".aws/config", config);
        case
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.home.path().join(path);
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(path, text).unwrap();
    }

    /// Returns the output of a process with these environment variables.
    fn says(&self, variables: &[(&str, &str)]) -> String {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", "aws::tests::lists_a_bucket_twice", "--ignored", "--nocapture"]);
        command.env_clear().env("HOME", self.home.path()).env("PATH", env::var_os("PATH").unwrap());
        command.env("AWS_ENDPOINT_URL", &self.server.url).env("AWS_ALLOW_HTTP", "true");
        let output = command.envs(variables.iter().copied()).current_dir(self.home.path()).output().unwrap();
        String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap()
    }

    /// Returns the requests of a process with these variables, which must list the bucket.
    #[track_caller]
    fn requests(&self, variables: &[(&str, &str)]) -> Vec<String> {
        let said = self.says(variables);
        assert!(said.contains("listed"), "{said}");
        std::mem::take(&mut *locked(&self.server.requests))
    }

    /// Checks the key and region that sign the last request of such a process, and whether it has a session
    /// token.
    #[track_caller]
    fn signs(&self, variables: &[(&str, &str)], key: &str, region: &str, token: Option<&str>) -> Vec<String> {
        let requests = self.requests(variables);
        let last = requests.last().unwrap();
        assert!(
            last.contains(&format!("Credential={key}/")) && last.contains(&format!("/{region}/s3/")),
            "{last}"
        );
        match token {
            Some(token) => assert!(last.contains(&format!("x-amz-security-token: {token}\r\n")), "{last}"),
            None => assert!(!last.contains("security-token"), "{last}"),
        }
        requests
    }

    /// Checks that such a process fails with an error that contains these parts.
    #[track_caller]
    fn fails(&self, variables: &[(&str, &str)], parts: &[&str]) {
        let said = self.says(variables);
        assert!(!said.contains("listed") && parts.iter().all(|part| said.contains(part)), "{said}");
    }
}

#[test]
#[ignore = "a process of the other tests"]
#[allow(clippy::print_stdout, reason = "the other tests read it")]
fn lists_a_bucket_twice() {
    let twice = || {
        let storage = Storage::open(Path::new("s3://bucket/folder"))?;
        storage.entries("")?;
        storage.entries("")
    };
    match twice() {
        Ok(entries) => println!("listed {entries:?}"),
        Err(error) => println!("{:?} {error}", error.fault().kind),
    }
}

const KEYS: &str = "[default]\naws_access_key_id = DEFAULT\naws_secret_access_key = s\n\
                    [other]\naws_access_key_id = OTHER\naws_secret_access_key = s\naws_session_token = of-other\n";

#[test]
fn keys_and_regions_come_from_a_profile() {
    let case = Case::new("[default]\nregion = eu-central-1\n[profile other]\nregion = ap-south-1\n");
    case.write(".aws/credentials", KEYS);
    case.signs(&[], "DEFAULT", "eu-central-1", None);
    case.signs(&[("AWS_PROFILE", "")], "DEFAULT", "eu-central-1", None);
    case.signs(&[("AWS_PROFILE", "other")], "OTHER", "ap-south-1", Some("of-other"));
    case.signs(
        &[("AWS_PROFILE", "other"), ("AWS_REGION", "us-west-2")],
        "OTHER",
        "us-west-2",
        Some("of-other"),
    );
    let elsewhere = Case::new("");
    elsewhere.write("config", "[profile other]\nregion = ap-south-1\n");
    elsewhere.write("keys", KEYS);
    let files =
        [("AWS_CONFIG_FILE", "config"), ("AWS_SHARED_CREDENTIALS_FILE", "keys"), ("AWS_PROFILE", "other")];
    elsewhere.signs(&files, "OTHER", "ap-south-1", Some("of-other"));
}

#[test]
fn the_environment_takes_precedence_over_profiles() {
    let case = Case::new("[default]\nregion = eu-central-1\ncredential_process = touch asked\n");
    let keys =
        [("AWS_ACCESS_KEY_ID", "ENVIRONMENT"), ("AWS_SECRET_ACCESS_KEY", "s"), ("AWS_PROFILE", "nowhere")];
    case.signs(&keys, "ENVIRONMENT", "us-east-1", None);
    let unsigned = case.requests(&[("AWS_SKIP_SIGNATURE", "true"), ("AWS_PROFILE", "nowhere")]);
    assert!(unsigned.iter().all(|request| !request.contains("Credential=")), "{unsigned:?}");
    assert!(!case.home.path().join("asked").exists());
}

/// With a profile without credentials, the machine's credentials are used.
#[test]
fn a_profile_may_have_a_region_alone() {
    let case = Case::new("[default]\nregion = eu-central-1\n");
    let container = [("AWS_CONTAINER_CREDENTIALS_FULL_URI", &*format!("{}/container", case.server.url))];
    let token = [("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "token")];
    case.write("token", "secret");
    case.signs(&[container, token].concat(), "CONTAINER", "eu-central-1", Some("of-container"));
}

#[test]
fn a_role_is_assumed_once() {
    let case = Case::new(
        "[profile role]\nregion = eu-central-1\nrole_arn = arn:aws:iam::1:role/a\nsource_profile = other\n",
    );
    case.write(".aws/credentials", KEYS);
    let requests = case.signs(&[("AWS_PROFILE", "role")], "ROLE", "eu-central-1", Some("of-role"));
    let asked: Vec<_> = requests.iter().filter(|request| request.contains("Action=AssumeRole")).collect();
    assert_eq!((requests.len(), asked.len()), (3, 1), "{requests:?}");
    assert!(asked[0].contains("Credential=OTHER/") && asked[0].contains("/eu-central-1/sts/"), "{asked:?}");

    let nowhere =
        [("AWS_PROFILE", "role"), ("AWS_ENDPOINT_URL_STS", "http://127.0.0.1:1"), ("NO_PROXY", "*")];
    case.fails(&nowhere, &["Storage", "`role` gives no credentials", "http://127.0.0.1:1/ does not answer"]);

    let case = Case::new("[default]\nrole_arn = arn:aws:iam::1:role/a\nweb_identity_token_file = token\n");
    case.write("token", "identity");
    let requests = case.signs(&[], "ROLE", "us-east-1", Some("of-role"));
    assert!(requests[0].contains("WebIdentityToken=identity"), "{requests:?}");
}

#[test]
fn a_process_gives_credentials_until_they_expire() {
    let script = |expiration: &str, key: &str| {
        let keys =
            r#""Version": 1, "AccessKeyId": "PROCESS", "SecretAccessKey": "s", "SessionToken": "of-process""#;
        format!("echo asked >> log; echo '{{{keys}{expiration}}}'{key}")
    };
    for (expiration, times) in [
        ("", 1),
        (r#", "Expiration": "2199-01-01T00:00:00Z""#, 1),
        (r#", "Expiration": "2020-01-01T00:00:00Z""#, 2),
    ] {
        let case = Case::new("[default]\ncredential_process = sh credentials.sh\n");
        case.write("credentials.sh", &script(expiration, ""));
        case.signs(&[], "PROCESS", "us-east-1", Some("of-process"));
        let log = fs_err::read_to_string(case.home.path().join("log")).unwrap();
        assert_eq!(log.lines().count(), times, "{expiration}");
    }
    let case = Case::new("[profile p]\ncredential_process = sh credentials.sh\n");
    case.write("credentials.sh", "echo asked >> log; echo no session >&2; exit 3");
    let parts = [
        "Storage",
        "`s3://bucket/folder/` cannot be read",
        "`p` gives no credentials",
        "no session",
        "hint: run",
    ];
    case.fails(&[("AWS_PROFILE", "p")], &parts);
    let log = fs_err::read_to_string(case.home.path().join("log")).unwrap();
    assert_eq!(log, "asked\n");
}

#[test]
fn a_session_of_sso_gives_credentials() {
    let case = Case::new(
        "[profile sso]\nregion = eu-central-1\nsso_session = dev\nsso_account_id = 1\nsso_role_name = reader\n\
         [sso-session dev]\nsso_region = eu-west-1\nsso_start_url = https://example.invalid/start\n\
         [profile role]\nrole_arn = arn:aws:iam::1:role/a\nsource_profile = sso\n",
    );
    let token = |expires: &str| {
        let text = format!(r#"{{"accessToken": "of-person", "expiresAt": "{expires}"}}"#);
        // The name is the SHA-1 of `dev`.
        case.write(".aws/sso/cache/34c6fceca75e456f25e7e99531e2425c6c1de443.json", &text);
    };
    let (sso, role) = ([("AWS_PROFILE", "sso")], [("AWS_PROFILE", "role")]);
    let hint = "hint: run `aws sso login --profile sso`";
    case.fails(&sso, &["Storage", "`sso` gives no credentials", hint]);
    token("2199-01-01T00:00:00Z");
    let requests = case.signs(&sso, "SSO", "eu-central-1", Some("of-sso"));
    assert!(requests[0].contains("x-amz-sso_bearer_token: of-person"), "{requests:?}");
    let requests = case.signs(&role, "ROLE", "us-east-1", Some("of-role"));
    assert!(requests[1].contains("Credential=SSO/"), "{requests:?}");
    token("2020-01-01T00:00:00Z");
    case.fails(&sso, &["`sso` gives no credentials", "expired", hint]);
    case.fails(&role, &["`role` gives no credentials", "expired", hint]);
}

#[test]
fn a_profile_that_does_not_exist_is_an_error() {
    let case = Case::new("[profile a]\nregion = x\n[b]\nregion = y\n");
    let missing = "AWS_PROFILE is `b`, and neither `~/.aws/config` nor `~/.aws/credentials` has this profile";
    case.fails(
        &[("AWS_PROFILE", "b")],
        &["Options", missing, "hint: set AWS_PROFILE to one of `a`", "[profile b]"],
    );
    case.fails(
        &[("AWS_PROFILE", "b"), ("AWS_CONFIG_FILE", "none")],
        &["neither `none`", "aws configure --profile b"],
    );
    let case = Case::new("[default]\nregion\n");
    case.fails(&[], &["Options", "the profiles of AWS cannot be read"]);
    let case = Case::new("[default]\nrole_arn = a\nsource_profile = nowhere\n");
    case.fails(&[], &["Options", "`default` gives no credentials", "nowhere"]);
    let case = Case::new("[default]\nlogin_session = arn\n");
    case.fails(&[], &["Options", "`default` has a `login_session`", "export-credentials --profile default`"]);
}

#[test]
fn credentials_are_renewed_before_they_expire() {
    let now = SystemTime::UNIX_EPOCH;
    for (left, after) in [(3600, 3300), (500, 250), (10, 5), (0, 0)] {
        let seconds = Duration::from_secs;
        assert_eq!(renewal(now, now + seconds(left)), now + seconds(after));
    }
    assert_eq!(renewal(now + LIMIT, now), now + LIMIT);
}
