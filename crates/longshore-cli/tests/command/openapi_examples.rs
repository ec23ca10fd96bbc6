//! Every example of the OpenAPI document works in `longshore dev` as it stands: `/docs` offers
//! them for "Try it out".

use longshore::JobId;
use serde_json::Value;

use crate::fixture::binary;
use crate::process::{Process, request};

/// Those that create something first, so that what they create exists for the other requests; deletes last.
const METHODS: [&str; 5] = ["put", "patch", "post", "get", "delete"];

/// A value for a required parameter: its example, or the id of a job, flow or operation that exists.
fn value(parameter: &Value, job: &str) -> String {
    let example = parameter.get("example").unwrap_or(&parameter["schema"]["example"]);
    match (example, parameter["name"].as_str().unwrap()) {
        (Value::String(example), _) => example.clone(),
        (_, "id") => job.to_owned(),
        (_, "file") => "swagger-ui.css".to_owned(),
        // Signing off an unknown worker changes nothing.
        (_, "worker_id") => JobId::new().to_string(),
        (_, name) => panic!("`{name}` needs an example"),
    }
}

#[test]
fn every_example_succeeds_unless_its_description_says_otherwise() {
    let folder = std::env::temp_dir().join(format!("longshore-examples-{}", JobId::new()));
    let mut command = binary();
    command.args(["dev", "--bind", "127.0.0.1:0", "--json", "--data-dir", folder.to_str().unwrap()]);
    let mut dev = Process::start(&mut command);
    let addr = dev.address();
    let document = request(&addr, "GET", "/api-docs/openapi.json", None, "").json(200);
    let (mut bodies, mut calls) = (0, 0);
    for method in METHODS {
        for (route, methods) in document["paths"].as_object().unwrap() {
            // The stream of events never ends.
            let Some(operation) =
                methods.get(method).filter(|_| (method, route.as_str()) != ("get", "/events"))
            else {
                continue;
            };
            let later = r#"{"kind":"summarize_text","payload":{"text":"Later."},"delay_seconds":3600}"#;
            let flow = format!(r#"{{"name":"later","sealed":false,"tasks":[{later}]}}"#);
            let change = r#"{"action":"retry","filter":{"tag":"none"}}"#;
            let job = match route.split('/').nth(1) {
                Some("flows") => request(&addr, "POST", "/flows", None, &flow).json(201),
                Some("operations") => request(&addr, "POST", "/operations", None, change).json(202),
                _ => request(&addr, "POST", "/jobs", None, later).json(201),
            };
            let job = job["id"].clone();
            let mut path = route.clone();
            for parameter in operation["parameters"].as_array().into_iter().flatten() {
                if parameter["required"] != true {
                    continue;
                }
                let name = parameter["name"].as_str().unwrap();
                let value = value(parameter, job.as_str().unwrap());
                if parameter["in"] == "path" {
                    path = path.replace(&format!("{{{name}}}"), &value);
                } else {
                    path = format!("{path}{}{name}={value}", if path.contains('?') { '&' } else { '?' });
                }
            }
            let example = &operation["requestBody"]["content"]["application/json"]["example"];
            let body = if example.is_null() { String::new() } else { example.to_string() };
            bodies += usize::from(!example.is_null());
            calls += 1;
            let reply = request(&addr, &method.to_uppercase(), &path, None, &body);
            let description = operation["description"].as_str().unwrap_or_default();
            assert!(
                reply.status < 400 || description.contains(&reply.status.to_string()),
                "{method} {path} {body}: {} {}",
                reply.status,
                reply.text
            );
        }
    }
    assert!(bodies > 10 && calls > 35, "{bodies} bodies in {calls} calls");
    let _ = std::fs::remove_dir_all(&folder);
}
