//! Webhook signatures as defined by [Standard Webhooks](https://www.standardwebhooks.com):
//! HMAC-SHA256 over the message id, the timestamp and the body, one per secret.

use std::fmt;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::Secret;

/// The prefix of every secret.
const PREFIX: &str = "whsec_";
/// The length of a key in bytes, as required by the standard.
const KEY_LENGTH: std::ops::RangeInclusive<usize> = 24..=64;

/// The signing keys. May be empty.
pub(super) struct Keys(Vec<Hmac<Sha256>>);

impl Keys {
    /// Parses the configured secrets. The error names the secret by its number and does
    /// not show it.
    pub(super) fn parse(secrets: &[Secret]) -> Result<Self, String> {
        let secrets = secrets.iter().map(Secret::expose).filter(|secret| !secret.is_empty());
        secrets
            .enumerate()
            .map(|(index, secret)| {
                parse_key(secret).map_err(|error| format!("secret number {}: {error}", index + 1))
            })
            .collect::<Result<_, _>>()
            .map(Keys)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The value of the `webhook-signature` header, or `None` without a key.
    pub(super) fn sign(&self, id: impl fmt::Display, timestamp: i64, body: &[u8]) -> Option<String> {
        let signatures = self.0.iter().map(|key| {
            let mut mac = key.clone();
            mac.update(format!("{id}.{timestamp}.").as_bytes());
            mac.update(body);
            format!("v1,{}", BASE64_STANDARD.encode(mac.finalize().into_bytes()))
        });
        let signatures: Vec<String> = signatures.collect();
        (!signatures.is_empty()).then(|| signatures.join(" "))
    }
}

fn parse_key(secret: &str) -> Result<Hmac<Sha256>, String> {
    let remedy =
        "use whsec_ followed by the base64 of 24 to 64 random bytes, as from `openssl rand -base64 32`";
    let text = secret.strip_prefix(PREFIX).ok_or_else(|| format!("does not start with whsec_; {remedy}"))?;
    let bytes = BASE64_STANDARD.decode(text).map_err(|_| format!("not base64 after whsec_; {remedy}"))?;
    if !KEY_LENGTH.contains(&bytes.len()) {
        return Err(format!("the key has {} bytes; {remedy}", bytes.len()));
    }
    Hmac::new_from_slice(&bytes).map_err(|_| format!("not a valid key; {remedy}"))
}

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use std::process::Command;

    use super::*;

    /// The test vector of the standard's own libraries.
    const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    const SIGNATURE: &str = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=";

    fn keys(secrets: &[&str]) -> Result<Keys, String> {
        let secrets: Vec<Secret> = secrets.iter().map(|secret| Secret::new(secret)).collect();
        Keys::parse(&secrets)
    }

    fn sign_test_vector(keys: &Keys) -> Option<String> {
        keys.sign("msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, br#"{"test": 2432232314}"#)
    }

    #[test]
    fn the_standards_test_vector_gets_the_published_signature() {
        assert_eq!(sign_test_vector(&keys(&[SECRET]).unwrap()).unwrap(), SIGNATURE);
    }

    #[test]
    fn each_secret_adds_a_signature_and_no_secret_means_no_signature() {
        let other = format!("whsec_{}", BASE64_STANDARD.encode([7; 32]));
        let both = sign_test_vector(&keys(&[&other, SECRET]).unwrap()).unwrap();
        let [first, second] = both.split(' ').collect::<Vec<_>>()[..] else { panic!("{both}") };
        assert_eq!(first, sign_test_vector(&keys(&[&other]).unwrap()).unwrap());
        assert_eq!(second, SIGNATURE);
        for no_secrets in [&[][..], &[""]] {
            let keys = keys(no_secrets).unwrap();
            assert!(keys.is_empty());
            assert_eq!(sign_test_vector(&keys), None);
        }
    }

    #[test]
    fn another_implementation_computes_the_same_signatures() {
        const SCRIPT: &str = "
import base64, hashlib, hmac, sys
secret, id, timestamp = sys.argv[1:]
signed = f'{id}.{timestamp}.'.encode() + sys.stdin.buffer.read()
key = base64.b64decode(secret.removeprefix('whsec_'))
print('v1,' + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode())";
        for (size, body) in
            [(24, &b""[..]), (32, b"{}"), (64, "{\"ship\":\"\u{26f5}\"}".as_bytes()), (33, &[0xff; 70_000])]
        {
            let secret = format!("whsec_{}", BASE64_STANDARD.encode(vec![size; size.into()]));
            let mut python = Command::new("python3");
            let python =
                python.args(["-c", SCRIPT, &secret, "01990000-0000-7000-8000-000000000001", "1700000000"]);
            let expected = crate::builtin::testing::output_of(python, body);
            let signature =
                keys(&[&secret]).unwrap().sign("01990000-0000-7000-8000-000000000001", 1_700_000_000, body);
            assert_eq!(signature.unwrap(), expected.trim());
        }
    }

    #[test]
    fn an_invalid_secret_is_refused_by_its_number_and_not_shown() {
        let short = format!("whsec_{}", BASE64_STANDARD.encode([1; 23]));
        let long = format!("whsec_{}", BASE64_STANDARD.encode([1; 65]));
        for (invalid, reason) in [
            ("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "start with whsec_"),
            ("whsec_M!KQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "not base64"),
            (&short, "23 bytes"),
            (&long, "65 bytes"),
        ] {
            let error = keys(&[SECRET, invalid]).err().unwrap();
            assert!(error.starts_with("secret number 2: ") && error.contains(reason), "{error}");
            assert!(error.contains("openssl rand") && !error.contains(&invalid[6..]), "{error}");
        }
    }
}
