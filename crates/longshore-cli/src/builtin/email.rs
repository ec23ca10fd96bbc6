//! `send_email`: by the mail server that is configured, or as files in an outbox
//! where there is none: for machines that must not send, and for trying it out.

use std::time::Duration;

use lettre::message::Mailbox;
use lettre::message::header::ContentType;
use lettre::transport::smtp;
use lettre::{Address, AsyncSmtpTransport, AsyncTransport, Message, Tokio1Executor};
use longshore::JobId;
use longshore::worker::{Context, Failure};
use serde::Deserialize;
use serde_json::{Value, json};

use super::folder::Folder;
use super::{Kind, Settings, unless_stopped};
use crate::failure;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SendEmail {
    pub(super) to: String,
    pub(super) subject: String,
    pub(super) body: String,
}

impl Kind for SendEmail {
    const NAME: &'static str = "send_email";

    fn check(&self) -> Result<(), String> {
        let odd = |c: char| c.is_whitespace() || c.is_control();
        if self.to.contains(odd) || self.to.parse::<Address>().is_err() {
            return Err("to: not an address; write it like ada@example.com".into());
        }
        // A line break would end the header and begin another.
        if self.subject.contains(char::is_control) {
            return Err("subject: holds a line break or another control character; leave it out".into());
        }
        Ok(())
    }

    fn schema() -> Value {
        json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "send_email",
            "type": "object",
            "properties": {
                "to": {
                    "type": "string",
                    "pattern": "^[^\\s\\p{Cc}]+@[^\\s\\p{Cc}@]+$",
                    "description": "One address.",
                    "examples": ["ada@example.com"],
                },
                "subject": { "type": "string", "pattern": "^\\P{Cc}*$", "description": "One line." },
                "body": { "type": "string", "description": "Plain text." },
            },
            "required": ["to", "subject", "body"],
            "additionalProperties": false,
        })
    }
}

/// How long a server may take for one message.
const TIMEOUT: Duration = Duration::from_secs(60);
/// How much of a server's words is repeated.
const WORDS: usize = 200;

/// How mail goes out.
pub(super) struct Mail {
    from: Mailbox,
    way: Way,
}

enum Way {
    Server(AsyncSmtpTransport<Tokio1Executor>),
    Outbox(Folder),
}

impl Mail {
    pub(super) fn open(settings: &Settings) -> Result<Self, failure::Failure> {
        let url = settings.smtp_url.as_ref().map(|url| url.expose()).filter(|url| !url.is_empty());
        let Some(url) = url else {
            let outbox = Folder::new("--outbox", &settings.outbox)?;
            let folder = outbox.path().display();
            tracing::info!("mail is written to {folder}: no --smtp-url (LONGSHORE_SMTP_URL) is given");
            let from = settings.mail_from.clone().map_or_else(nobody, Ok)?;
            return Ok(Mail { from, way: Way::Outbox(outbox) });
        };
        // The message shows nothing of the URL, which holds a password.
        let server = AsyncSmtpTransport::<Tokio1Executor>::from_url(url).map_err(|_| {
            failure::Failure::usage(
                "--smtp-url: not the URL of a mail server; write smtps://user:password@mail.example.com \
                 or smtp://user:password@mail.example.com:587?tls=required, with odd characters of the \
                 password percent-encoded",
            )
        })?;
        let from = settings.mail_from.clone().ok_or_else(|| {
            failure::Failure::usage(
                "--mail-from: needed with --smtp-url, because servers refuse mail from nobody; \
                 write it like harbour@example.com",
            )
        })?;
        if url.starts_with("smtp:") && !url.contains("tls=") {
            tracing::warn!(
                "--smtp-url: mail goes to the server in the clear; smtps:// or ?tls=required would not"
            );
        }
        Ok(Mail { from, way: Way::Server(server.timeout(Some(TIMEOUT)).build()) })
    }

    fn compose(&self, mail: &SendEmail, message_id: &str) -> Result<Message, Failure> {
        let to: Address = mail.to.parse().map_err(Failure::permanent)?;
        Message::builder()
            .from(self.from.clone())
            .to(to.into())
            .subject(&mail.subject)
            .message_id(Some(message_id.to_owned()))
            .header(ContentType::TEXT_PLAIN)
            .body(mail.body.clone())
            .map_err(Failure::permanent)
    }

    /// The same for every attempt, so that a message that arrives twice is known
    /// for one.
    fn message_id(&self, job: JobId) -> String {
        format!("<{job}@{}>", self.from.email.domain())
    }
}

/// Who writes what nobody will send.
fn nobody() -> Result<Mailbox, failure::Failure> {
    "longshore@localhost"
        .parse()
        .map_err(|error| failure::Failure::usage(format_args!("--mail-from: {error}")))
}

pub(super) async fn send(mail: SendEmail, ctx: Context<Mail>) -> Result<(), Failure> {
    mail.check().map_err(Failure::permanent)?;
    let out = ctx.state();
    let message_id = out.message_id(ctx.id());
    let message = out.compose(&mail, &message_id)?;
    let result = match &out.way {
        Way::Server(server) => {
            unless_stopped(&ctx, submit(server, message)).await?;
            json!({ "message_id": message_id })
        }
        Way::Outbox(outbox) => {
            let path = outbox.put(&ctx, "eml", message.formatted()).await?;
            json!({ "message_id": message_id, "path": path })
        }
    };
    ctx.set_result(&result)?;
    Ok(())
}

async fn submit(server: &AsyncSmtpTransport<Tokio1Executor>, message: Message) -> Result<(), Failure> {
    match tokio::time::timeout(TIMEOUT, server.send(message)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(refused(&error)),
        Err(_) => Err(Failure::retry(format!("the mail server took longer than {} s", TIMEOUT.as_secs()))),
    }
}

/// A refusal for good if the server means the message; its 5xx about who we are
/// is for the operator to mend, and the mail can wait for that.
fn refused(error: &smtp::Error) -> Failure {
    let words: String = error.to_string().chars().take(WORDS).collect();
    match error.status().map(u16::from) {
        Some(530 | 534 | 535 | 538) => {
            Failure::retry(format!("the mail server does not let us in: {words}; see --smtp-url"))
        }
        _ if error.is_permanent() => Failure::permanent(format!("the mail server refuses it: {words}")),
        _ => Failure::retry(format!("the mail server did not take it: {words}")),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use longshore::{JobRecord, Status};

    use super::*;
    use crate::builtin::testing::{MailServer, Scratch, run, run_to_the_end};
    use crate::secret::Secret;

    fn payload(to: &str) -> Value {
        json!({ "to": to, "subject": "Sch\u{f6}ne Gr\u{fc}\u{df}e", "body": "first line\n.\n\u{26f5} last line" })
    }

    fn settings(url: &str) -> Settings {
        Settings {
            smtp_url: Some(Secret::read(url).unwrap()),
            mail_from: Some("Harbour <harbour@example.com>".parse().unwrap()),
            ..Settings::default()
        }
    }

    fn result(job: &JobRecord) -> Value {
        serde_json::from_str(job.result.as_ref().unwrap().get()).unwrap()
    }

    #[tokio::test]
    async fn without_a_server_a_message_becomes_a_file() {
        let scratch = Scratch::new();
        let settings = Settings { outbox: scratch.path().join("outbox"), ..Settings::default() };
        let job = run(&settings, "send_email", &payload("ada@example.com")).await;
        assert_eq!(job.status, Status::Succeeded, "{:?}", job.last_error);
        let path = settings.outbox.join(format!("{}.eml", job.id));
        let message_id = format!("<{}@localhost>", job.id);
        assert_eq!(result(&job), json!({ "message_id": message_id, "path": path }));
        let message = std::fs::read_to_string(path).unwrap();
        for line in [
            "To: ada@example.com",
            "From: longshore@localhost",
            &format!("Message-ID: {message_id}"),
            "Date: ",
        ] {
            assert!(message.contains(line), "{line}: {message}");
        }
        assert_eq!(std::fs::read_dir(&settings.outbox).unwrap().count(), 1, "nothing half written is left");
    }

    #[tokio::test]
    async fn a_server_gets_the_message_as_it_was_written() {
        let Some(mut server) = MailServer::start(&[]) else { return };
        let job = run(&settings(&server.url("")), "send_email", &payload("ada@example.com")).await;
        assert_eq!(job.status, Status::Succeeded, "{:?}", job.last_error);
        let message_id = format!("<{}@example.com>", job.id);
        assert_eq!(result(&job), json!({ "message_id": message_id }));
        let expected = json!({
            "from": "harbour@example.com",
            "to": ["ada@example.com"],
            "header_from": "Harbour <harbour@example.com>",
            "subject": "Sch\u{f6}ne Gr\u{fc}\u{df}e",
            "message_id": message_id,
            "body": "first line\n.\n\u{26f5} last line",
        });
        assert_eq!(server.took(), expected);
    }

    #[tokio::test]
    async fn a_refusal_for_good_ends_the_job() {
        let Some(server) = MailServer::start(&[]) else { return };
        let job =
            run_to_the_end(&settings(&server.url("")), "send_email", &payload("refused@example.com")).await;
        assert_eq!((job.status, job.attempts), (Status::FailedPermanent, 1));
        let told = job.last_error.unwrap();
        assert!(
            told.starts_with("the mail server refuses it: ") && told.contains("no such mailbox"),
            "{told}"
        );
        assert!(!told.contains("last line"), "{told}");
    }

    #[tokio::test]
    async fn a_busy_server_is_tried_again_with_the_same_message_id() {
        let Some(mut server) = MailServer::start(&[]) else { return };
        let job =
            run_to_the_end(&settings(&server.url("")), "send_email", &payload("busy@example.com")).await;
        assert_eq!((job.status, job.attempts), (Status::Succeeded, 2), "{:?}", job.last_error);
        assert!(job.errors[0].error.as_ref().unwrap().contains("try later"), "{:?}", job.errors);
        assert_eq!(server.took()["message_id"], format!("<{}@example.com>", job.id));
    }

    #[tokio::test]
    async fn a_server_that_is_away_is_tried_again() {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let url = format!("smtp://ada:s3cret@127.0.0.1:{port}");
        let job = run_to_the_end(&settings(&url), "send_email", &payload("ada@example.com")).await;
        assert_eq!((job.status, job.attempts), (Status::FailedPermanent, 3), "its attempts are used up");
        let told = job.last_error.unwrap();
        assert!(told.starts_with("the mail server did not take it: "), "{told}");
        assert!(!told.contains("s3cret"), "{told}");
    }

    #[tokio::test]
    async fn a_password_opens_the_server_and_a_wrong_one_is_not_the_messages_fault() {
        let Some(mut server) = MailServer::start(&["--password", "s3cret"]) else { return };
        let job = run(&settings(&server.url("ada:s3cret@")), "send_email", &payload("ada@example.com")).await;
        assert_eq!(job.status, Status::Succeeded, "{:?}", job.last_error);
        assert_eq!(server.took()["to"], json!(["ada@example.com"]));
        let job = run(&settings(&server.url("ada:wr0ng@")), "send_email", &payload("ada@example.com")).await;
        assert_eq!(job.status, Status::Retrying);
        let told = job.last_error.unwrap();
        assert!(
            told.starts_with("the mail server does not let us in: ") && told.contains("--smtp-url"),
            "{told}"
        );
        assert!(!told.contains("wr0ng"), "{told}");
    }

    #[test]
    fn settings_are_refused_by_their_flag_and_no_password_is_shown() {
        for url in ["mail.example.com", "http://ada:s3cret@mail", "smtp://", "smtp://a?tls=s3cret"] {
            let refused = Mail::open(&settings(url)).err().unwrap().to_string();
            assert!(refused.starts_with("--smtp-url: "), "{refused}");
            assert!(!refused.contains("s3cret"), "{refused}");
        }
        let nobody = Settings { mail_from: None, ..settings("smtps://mail.example.com") };
        assert!(Mail::open(&nobody).err().unwrap().to_string().starts_with("--mail-from: "));
    }
}
