"""A mail server for tests: says its port on standard output, then one line of
JSON for each message it takes, in the words of Python's own parser.

refused@… is refused for good, busy@… the first time only. With --password, only
who knows it gets in; with --tls, a certificate and its key, it speaks TLS.
"""

import argparse
import base64
import email
import email.policy
import json
import socketserver
import ssl
import threading

flags = argparse.ArgumentParser()
flags.add_argument("--password")
flags.add_argument("--tls", nargs=2)
flags = flags.parse_args()
PASSWORD = flags.password
BUSY = set()
OUT = threading.Lock()


def say(line):
    with OUT:
        print(line, flush=True)


class Session(socketserver.StreamRequestHandler):
    def reply(self, text):
        self.wfile.write(text.encode() + b"\r\n")

    def handle(self):
        self.reply("220 test mail server")
        known, sender, recipients = PASSWORD is None, None, []
        for line in self.rfile:
            command = line.decode().rstrip("\r\n")
            verb = command.split(":")[0].split(" ")[0].upper()
            if verb == "EHLO":
                self.wfile.write(b"250-test\r\n")
                if PASSWORD is not None:
                    self.wfile.write(b"250-AUTH PLAIN\r\n")
                self.reply("250 8BITMIME")
            elif verb == "AUTH":
                given = base64.b64decode(command.split(" ")[2]).split(b"\0")[2].decode()
                known = given == PASSWORD
                self.reply("235 welcome" if known else "535 5.7.8 not the password")
            elif verb == "QUIT":
                self.reply("221 bye")
                return
            elif not known:
                self.reply("530 5.7.0 say who you are")
            elif verb == "MAIL":
                sender = command.split("<")[1].split(">")[0]
                self.reply("250 ok")
            elif verb == "RCPT":
                recipient = command.split("<")[1].split(">")[0]
                if recipient.startswith("refused@"):
                    self.reply("550 5.1.1 no such mailbox")
                elif recipient.startswith("busy@") and recipient not in BUSY:
                    BUSY.add(recipient)
                    self.reply("451 4.3.0 try later")
                else:
                    recipients.append(recipient)
                    self.reply("250 ok")
            elif verb == "DATA":
                self.reply("354 go on")
                self.take(sender, recipients)
                self.reply("250 taken")
            else:
                self.reply("250 ok")

    def take(self, sender, recipients):
        lines = []
        for line in self.rfile:
            if line == b".\r\n":
                break
            lines.append(line[1:] if line.startswith(b".") else line)
        message = email.message_from_bytes(b"".join(lines), policy=email.policy.default)
        body = message.get_content().replace("\r\n", "\n").rstrip("\n")
        say(json.dumps({
            "from": sender,
            "to": recipients,
            "header_from": message["From"],
            "subject": message["Subject"],
            "message_id": message["Message-ID"],
            "body": body,
        }))


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True


server = Server(("127.0.0.1", 0), Session)
if flags.tls:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*flags.tls)
    # Not while it accepts: a stranger who hangs up must not end the server.
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
say(server.server_address[1])
server.serve_forever()
