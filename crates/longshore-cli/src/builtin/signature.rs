//! Signatures as [Standard Webhooks](https://www.standardwebhooks.com) has them:
//! HMAC-SHA256 over the message's id, the time and the body, one for each secret.

use std::fmt;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::secret::Secret;

/// What every secret begins with.
const PREFIX: &str = "whsec_";
/// How long a key is, in bytes: what the standard asks for.
const KEY: std::ops::RangeInclusive<usize> = 24..=64;

/// The keys that sign, none or more.
pub(super) struct Keys(Vec<Hmac<Sha256>>);

impl Keys {
    /// Reads secrets as they are configured. The error says what is wrong with
    /// which of them, and shows none.
    pub(super) fn read(secrets: &[Secret]) -> Result<Self, String> {
        let given = secrets.iter().map(Secret::expose).filter(|secret| !secret.is_empty());
        given
            .enumerate()
            .map(|(nth, secret)| key(secret).map_err(|wrong| format!("secret number {}: {wrong}", nth + 1)))
            .collect::<Result<_, _>>()
            .map(Keys)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The value of `webhook-signature`; nothing without a key.
    pub(super) fn sign(&self, id: impl fmt::Display, timestamp: i64, body: &[u8]) -> Option<String> {
        let signed = self.0.iter().map(|key| {
            let mut mac = key.clone();
            mac.update(format!("{id}.{timestamp}.").as_bytes());
            mac.update(body);
            format!("v1,{}", BASE64_STANDARD.encode(mac.finalize().into_bytes()))
        });
        let signed: Vec<String> = signed.collect();
        (!signed.is_empty()).then(|| signed.join(" "))
    }
}

fn key(secret: &str) -> Result<Hmac<Sha256>, String> {
    let like =
        "write whsec_ and the base64 of 24 to 64 random bytes, as `openssl rand -base64 32` makes them";
    let text = secret.strip_prefix(PREFIX).ok_or_else(|| format!("does not begin with whsec_; {like}"))?;
    let bytes = BASE64_STANDARD.decode(text).map_err(|_| format!("not base64 after whsec_; {like}"))?;
    if !KEY.contains(&bytes.len()) {
        return Err(format!("its key has {} bytes; {like}", bytes.len()));
    }
    Hmac::new_from_slice(&bytes).map_err(|_| format!("no key; {like}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::process::Command;

    use super::*;

    /// The example that the standard's own libraries test with.
    const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    const SIGNATURE: &str = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=";

    fn keys(secrets: &[&str]) -> Result<Keys, String> {
        let secrets: Vec<Secret> = secrets.iter().map(|secret| Secret::read(secret).unwrap()).collect();
        Keys::read(&secrets)
    }

    fn published(keys: &Keys) -> Option<String> {
        keys.sign("msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, br#"{"test": 2432232314}"#)
    }

    #[test]
    fn the_published_example_is_signed_as_published() {
        assert_eq!(published(&keys(&[SECRET]).unwrap()).unwrap(), SIGNATURE);
    }

    #[test]
    fn each_secret_signs_while_they_change_and_none_signs_nothing() {
        let other = format!("whsec_{}", BASE64_STANDARD.encode([7; 32]));
        let both = published(&keys(&[&other, SECRET]).unwrap()).unwrap();
        let [first, second] = both.split(' ').collect::<Vec<_>>()[..] else { panic!("{both}") };
        assert_eq!(first, published(&keys(&[&other]).unwrap()).unwrap());
        assert_eq!(second, SIGNATURE);
        for none in [&[][..], &[""]] {
            let none = keys(none).unwrap();
            assert!(none.is_empty());
            assert_eq!(published(&none), None);
        }
    }

    #[test]
    fn another_implementation_makes_the_same_signatures() {
        const CHECK: &str = "
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
                python.args(["-c", CHECK, &secret, "01990000-0000-7000-8000-000000000001", "1700000000"]);
            let Some(theirs) = crate::builtin::testing::piped(python, body) else { return };
            let ours =
                keys(&[&secret]).unwrap().sign("01990000-0000-7000-8000-000000000001", 1_700_000_000, body);
            assert_eq!(ours.unwrap(), theirs.trim());
        }
    }

    #[test]
    fn a_wrong_secret_is_refused_by_its_number_and_never_shown() {
        let short = format!("whsec_{}", BASE64_STANDARD.encode([1; 23]));
        let long = format!("whsec_{}", BASE64_STANDARD.encode([1; 65]));
        for (wrong, told) in [
            ("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "begin with whsec_"),
            ("whsec_M!KQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "not base64"),
            (&short, "23 bytes"),
            (&long, "65 bytes"),
        ] {
            let refused = keys(&[SECRET, wrong]).err().unwrap();
            assert!(refused.starts_with("secret number 2: ") && refused.contains(told), "{refused}");
            assert!(refused.contains("openssl rand") && !refused.contains(&wrong[6..]), "{refused}");
        }
    }
}
