//! Certificates for brokers that listen with TLS.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

/// An authority, the certificate it gave a server, and an authority that gave none. Dropped, the files are removed.
pub(crate) struct Certificates {
    dir: PathBuf,
}

/// The server's is for the address only: "localhost" leads to the same server, by a name that isn't its own.
const CONF: &str = "
[req]
distinguished_name = name
[name]
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign
[server]
basicConstraints = critical, CA:FALSE
extendedKeyUsage = serverAuth
subjectAltName = IP:127.0.0.1
";

impl Certificates {
    pub(crate) fn new() -> Self {
        let dir = std::env::temp_dir().join(format!("posthouse-certificates-{:016x}", fastrand::u64(..)));
        fs::create_dir(&dir).expect("a directory for certificates");
        let made = Self { dir };
        fs::write(made.file("conf"), CONF).expect("write");
        for name in ["authority", "stranger"] {
            let subject = format!("/CN=posthouse test {name}");
            made.new_key("req -x509 -days 2 -extensions authority", name, &subject, "pem");
        }
        made.new_key("req", "server", "/CN=posthouse test server", "request");
        made.openssl(
            "x509 -req -days 2 -in server.request -CA authority.pem -CAkey authority.key -CAcreateserial \
             -extfile conf -extensions server -out server.pem",
            &[],
        );
        // Kafka reads both from one file.
        let both = fs::read_to_string(made.server_key()).expect("key") + &fs::read_to_string(made.server()).expect("certificate");
        fs::write(made.server_key_and_certificate(), both).expect("write");
        // The servers run as another user.
        fs::set_permissions(&made.dir, Permissions::from_mode(0o755)).expect("permissions");
        for file in [made.authority(), made.server(), made.server_key(), made.server_key_and_certificate()] {
            fs::set_permissions(file, Permissions::from_mode(0o644)).expect("permissions");
        }
        made
    }

    /// Who gave the server its certificate.
    pub(crate) fn authority(&self) -> PathBuf {
        self.file("authority.pem")
    }

    /// Who has nothing to do with the server.
    pub(crate) fn stranger(&self) -> PathBuf {
        self.file("stranger.pem")
    }

    pub(crate) fn server(&self) -> PathBuf {
        self.file("server.pem")
    }

    pub(crate) fn server_key(&self) -> PathBuf {
        self.file("server.key")
    }

    pub(crate) fn server_key_and_certificate(&self) -> PathBuf {
        self.file("both.pem")
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn new_key(&self, command: &str, name: &str, subject: &str, out: &str) {
        let options = "-config conf -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
        self.openssl(&format!("{command} {options} -keyout {name}.key -out {name}.{out}"), &["-subj", subject]);
    }

    fn openssl(&self, options: &str, more: &[&str]) {
        let mut command = Command::new("openssl");
        let made = command.current_dir(&self.dir).args(options.split_whitespace()).args(more).output().expect("openssl");
        assert!(made.status.success(), "{command:?}: {}", String::from_utf8_lossy(&made.stderr));
    }
}

impl Drop for Certificates {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}
