//! The flags of the built-in kinds, shared by every command that runs them.

use std::path::PathBuf;

use clap::Args;
use longshore::builtin::{self, Allowed, Sender, Settings};

use crate::secret::Secret;

#[derive(Debug, Args)]
#[command(next_help_heading = "Built-in kinds")]
pub(crate) struct Builtin {
    /// send_email: the mail server, like smtps://user:password@mail.example.com. Without it, messages
    /// are written to --outbox
    ///
    /// smtps:// uses TLS from the start (port 465). smtp://host:587?tls=required upgrades to TLS before
    /// anything is sent; smtp://host alone never uses TLS. Prefer the environment variable, because
    /// other users of the machine can read command lines.
    #[arg(long, value_name = "URL", value_parser = Secret::read, env = "LONGSHORE_SMTP_URL",
          hide_env_values = true)]
    smtp_url: Option<Secret>,

    /// send_email: the sender, like 'Harbour <harbour@example.com>'. Required with --smtp-url
    #[arg(long, value_name = "ADDRESS", env = "LONGSHORE_MAIL_FROM")]
    mail_from: Option<Sender>,

    /// send_email: the folder for messages as .eml files, used without --smtp-url
    #[arg(long, value_name = "FOLDER", default_value = "outbox", env = "LONGSHORE_OUTBOX")]
    outbox: PathBuf,

    /// resize_image: the folder that file:// URLs may read from. Without it, file:// is rejected
    #[arg(long, value_name = "FOLDER", env = "LONGSHORE_IMAGE_ROOT")]
    image_root: Option<PathBuf>,

    /// resize_image: the folder for the resized images, named <job id>.png
    #[arg(long, value_name = "FOLDER", default_value = "images", env = "LONGSHORE_IMAGE_OUTPUT")]
    image_output: PathBuf,

    /// webhook_delivery: the signing secret, as whsec_ followed by base64. During a rotation, give the
    /// new and the old one, separated by a comma
    ///
    /// Requests are signed as Standard Webhooks specifies, with one signature per secret, so a receiver
    /// can verify with either one. Without a secret, webhooks are not signed. Prefer the environment
    /// variable, because other users of the machine can read command lines.
    #[arg(long = "webhook-secret", value_name = "WHSEC,…", value_delimiter = ',', value_parser = Secret::read,
          env = "LONGSHORE_WEBHOOK_SECRETS", hide_env_values = true)]
    webhook_secrets: Vec<Secret>,

    /// webhook_delivery, resize_image: allow http:// URLs as well as https://
    #[arg(long, env = "LONGSHORE_ALLOW_HTTP", value_parser = clap::builder::FalseyValueParser::new())]
    allow_http: bool,

    /// webhook_delivery, resize_image: internal addresses that may be called, like
    /// 10.0.0.0/8,hooks.internal
    ///
    /// Anyone who can enqueue a job chooses its URL. Addresses of this machine and of private networks
    /// (127.0.0.1, 10.0.0.0/8, 169.254.169.254 and similar) are therefore rejected, even behind a host
    /// name, unless they are listed here. List an address, a network or a host name. A listed host name
    /// is trusted whatever address it resolves to.
    #[arg(long, value_name = "CIDR|HOST,…", value_delimiter = ',', env = "LONGSHORE_ALLOW_OUTBOUND")]
    allow_outbound: Vec<Allowed>,
}

impl Builtin {
    pub(crate) fn settings(&self) -> Settings {
        Settings {
            smtp_url: self.smtp_url.as_ref().map(secret),
            mail_from: self.mail_from.clone(),
            outbox: self.outbox.clone(),
            image_root: self.image_root.clone(),
            image_output: self.image_output.clone(),
            webhook_secrets: self.webhook_secrets.iter().map(secret).collect(),
            allow_http: self.allow_http,
            allow_outbound: self.allow_outbound.clone(),
        }
    }
}

fn secret(secret: &Secret) -> builtin::Secret {
    builtin::Secret::new(secret.expose())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use clap::{CommandFactory, Parser};

    use crate::args::{Cli, Command};

    use super::*;

    fn parse(words: &[&str]) -> Result<Settings, String> {
        let words = ["longshore", "worker"].iter().chain(words);
        match Cli::try_parse_from(words).map_err(|error| error.to_string())?.command {
            Command::Worker(worker) => Ok(worker.work.builtin.settings()),
            _ => unreachable!(),
        }
    }

    #[test]
    fn the_flag_defaults_match_the_default_settings() {
        assert_eq!(format!("{:?}", parse(&[]).unwrap()), format!("{:?}", Settings::default()));
    }

    #[test]
    fn every_flag_reaches_its_setting() {
        let settings = parse(&[
            "--smtp-url",
            "smtps://mail.example.com",
            "--mail-from",
            "Harbour <harbour@example.com>",
            "--outbox",
            "a",
            "--image-root",
            "b",
            "--image-output",
            "c",
            "--webhook-secret",
            "whsec_one,whsec_two",
            "--allow-http",
            "--allow-outbound",
            "10.0.0.0/8,hooks.internal",
        ])
        .unwrap();
        let expected = Settings {
            smtp_url: Some(builtin::Secret::new("smtps://mail.example.com")),
            mail_from: Some("Harbour <harbour@example.com>".parse().unwrap()),
            outbox: "a".into(),
            image_root: Some("b".into()),
            image_output: "c".into(),
            webhook_secrets: ["whsec_one", "whsec_two"].map(builtin::Secret::new).into(),
            allow_http: true,
            allow_outbound: ["10.0.0.0/8", "hooks.internal"].map(|text| text.parse().unwrap()).into(),
        };
        assert_eq!(settings, expected);
    }

    #[test]
    fn errors_name_the_flag_and_the_remedy() {
        for (flag, value, remedy) in [
            ("--mail-from", "harbour", "harbour@example.com"),
            ("--allow-outbound", "10.0.0.0/33", "10.0.0.0/8"),
            ("--allow-outbound", "https://a", "hooks.internal"),
        ] {
            let error = parse(&[flag, value]).unwrap_err();
            assert!(error.contains(flag) && error.contains(remedy), "{error}");
        }
    }

    #[test]
    fn debug_output_and_help_show_no_secret() {
        let settings =
            parse(&["--smtp-url", "smtps://ada:s3cret@mail", "--webhook-secret", "whsec_s3cret"]).unwrap();
        assert!(!format!("{settings:?}").contains("s3cret"), "{settings:?}");
        let command = Cli::command();
        let worker = command.find_subcommand("worker").unwrap();
        for secret in ["smtp_url", "webhook_secrets"] {
            let argument = worker.get_arguments().find(|arg| arg.get_id() == secret).unwrap();
            assert!(argument.is_hide_env_values_set(), "{secret}");
        }
    }
}
