//! Mutual TLS.

use std::process::Command;

use onefold_tests::Dir;

use crate::fleet::{Fleet, contents};

fn openssl(dir: &Dir, arguments: &str) {
    let mut words = arguments.split_whitespace();
    let output = Command::new("openssl").args(&mut words).current_dir(dir.root()).output().unwrap();
    assert!(output.status.success(), "openssl {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

/// An authority, and a certificate for this machine that it signed.
fn identity(dir: &Dir, name: &str) {
    dir.write(format!("{name}.ext"), "subjectAltName = DNS:localhost, IP:127.0.0.1\n");
    openssl(
        dir,
        &format!(
            "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={name}-authority -keyout {name}-ca.key -out {name}-ca.pem"
        ),
    );
    openssl(dir, &format!("req -newkey rsa:2048 -nodes -subj /CN={name} -keyout {name}.key -out {name}.csr"));
    openssl(
        dir,
        &format!(
            "x509 -req -days 2 -in {name}.csr -CA {name}-ca.pem -CAkey {name}-ca.key -CAcreateserial -extfile {name}.ext -out {name}.pem"
        ),
    );
}

fn options(certificate: &str, authority: &str) -> String {
    format!(
        "--tls-certificate {certificate}.pem --tls-key {certificate}.key --tls-authority {authority}-ca.pem"
    )
}

#[test]
fn all_connections_may_be_mutual_tls() {
    let dir = Dir::new();
    dir.command("onefold-data generate --workload rm1 --samples 500 --seed 4 --out logs").works();
    dir.command("onefold-ingest build logs/dataset.toml --buckets 4 --out here --threads 2").works();
    identity(&dir, "ours");
    identity(&dir, "theirs");
    let fleet = Fleet::with(&dir, 2, None, &options("ours", "ours"));
    fleet.command("build logs/dataset.toml --buckets 4 --out there").json();
    assert_eq!(contents(&dir.path("there")), contents(&dir.path("here")));

    let build = "onefold-cluster build logs/dataset.toml --out other --scheduler";
    let address = fleet.address();
    // Signed by another authority; does not know the scheduler's authority; no TLS.
    for options in [options("theirs", "ours"), options("ours", "theirs"), String::new()] {
        let output = dir.command(&format!("{build} {address} {options}")).with_time_limit(60).output();
        let error = String::from_utf8_lossy(&output.stderr);
        let refused = !output.status.success() && error.contains(&address) && error.contains("hint: ");
        assert!(refused, "{options}: {error}");
        assert!(!dir.path("other/snapshots").exists());
    }
    let half = dir.command(&format!("{build} {address} --tls-certificate ours.pem")).output();
    assert_eq!(half.status.code(), Some(2), "a certificate needs its key");
}
