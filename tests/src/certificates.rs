//! Certificates for tests of TLS, made by `openssl`.

use std::process::Command;
use std::time::Duration;

use crate::Dir;

/// The time after which a [certificate](Dir::certificate) for 0 days has expired. Certificates have a resolution of
/// one second, and are still valid in the last one.
pub const EXPIRY: Duration = Duration::from_secs(2);

impl Dir {
    /// Creates `NAME.pem` and `NAME.key`, a certificate for this machine that is valid for `days` days. A certificate
    /// for 0 days has expired [`EXPIRY`] after this function returns. Also creates `AUTHORITY-ca.pem`, the
    /// certificate of the authority that signs it, unless that file exists.
    #[track_caller]
    pub fn certificate(&self, name: &str, authority: &str, days: u32) {
        if !self.path(format!("{authority}-ca.pem")).exists() {
            self.openssl(&format!(
                "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={authority}-authority -keyout {authority}-ca.key \
                 -out {authority}-ca.pem"
            ));
        }
        self.write(format!("{name}.ext"), "subjectAltName = DNS:localhost, IP:127.0.0.1\n");
        self.openssl(&format!(
            "req -newkey rsa:2048 -nodes -subj /CN={name} -keyout {name}.key -out {name}.csr"
        ));
        self.openssl(&format!(
            "x509 -req -days {days} -in {name}.csr -CA {authority}-ca.pem -CAkey {authority}-ca.key -CAcreateserial \
             -extfile {name}.ext -out {name}.pem"
        ));
    }

    #[track_caller]
    fn openssl(&self, arguments: &str) {
        let words = arguments.split_whitespace();
        let output = Command::new("openssl").args(words).current_dir(self.root()).output().expect("openssl");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "openssl {arguments}: {errors}");
    }
}
