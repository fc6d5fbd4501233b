//! A dataset in a second store, which other people wrote: the S3 server of moto.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use onefold_tests::{Dir, TestCommand};

use crate::remote::{whole_path, with_logs};

/// moto's server, as a process that ends with the test.
struct Moto {
    process: Child,
    address: SocketAddr,
}

impl Drop for Moto {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Moto {
    /// Starts a server with the bucket `data` on a free port of 127.0.0.1.
    fn start(dir: &Dir) -> Self {
        let packages = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/moto.sh")).output().unwrap();
        assert!(packages.status.success(), "{}", String::from_utf8_lossy(&packages.stderr));
        let packages = String::from_utf8(packages.stdout).unwrap();
        // The port is free again when moto binds it.
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let log = fs_err::File::create(dir.path("moto.log")).unwrap().into_file();
        let mut command = Command::new("python3");
        command.args(["-m", "moto.server", "-H", "127.0.0.1", "-p", &address.port().to_string()]);
        command.env("PYTHONPATH", packages.trim()).env("PYTHONDONTWRITEBYTECODE", "1").stdin(Stdio::null());
        command.stdout(log.try_clone().unwrap()).stderr(log);
        let mut moto = Self { process: command.spawn().unwrap(), address };
        let started = Instant::now();
        while !moto.creates_bucket() {
            let told = || dir.text("moto.log");
            assert!(moto.process.try_wait().unwrap().is_none(), "moto ended: {}", told());
            assert!(started.elapsed() < Duration::from_secs(120), "moto does not answer: {}", told());
            std::thread::sleep(Duration::from_millis(100));
        }
        moto
    }

    fn creates_bucket(&self) -> bool {
        let Ok(mut stream) = TcpStream::connect(self.address) else { return false };
        let request =
            "PUT /data HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        let mut answer = String::new();
        stream.write_all(request.as_bytes()).unwrap();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        true
    }

    /// A command whose `s3://` URLs are of this server.
    fn command(&self, dir: &Dir, line: &str) -> TestCommand {
        let endpoint = format!("http://{}", self.address);
        let variables = [
            ("AWS_ENDPOINT_URL", endpoint.as_str()),
            ("AWS_ACCESS_KEY_ID", "onefold"),
            ("AWS_SECRET_ACCESS_KEY", "a secret"),
            ("AWS_REGION", "us-east-1"),
            ("AWS_ALLOW_HTTP", "true"),
            ("NO_PROXY", "127.0.0.1"),
            ("no_proxy", "127.0.0.1"),
        ];
        let command = dir.command(line);
        variables.into_iter().fold(command, |command, (name, value)| command.with_variable(name, value))
    }
}

#[test]
fn a_dataset_in_moto_is_that_of_a_local_disk() {
    let dir = with_logs(3000);
    let local = whole_path("dataset", "run-local", &|line| dir.command(line));
    // The server writes to its log all the time; a failing command must leave its folder alone.
    let own = Dir::new();
    let moto = Moto::start(&own);
    let remote = whole_path("s3://data/some/ds", "run-moto", &|line| moto.command(&dir, line));
    assert_eq!(remote, local);
    // Commits rest on this: what exists is not created again.
    let build = "onefold-ingest build logs/dataset.toml --out s3://data/some/ds";
    moto.command(&dir, build).fails(&["`s3://data/some/ds` already exists"]);
    moto.command(&dir, "onefold-read bench s3://nowhere/ds").fails(&["`s3://nowhere/ds", "no such bucket"]);
}
