use pilotlight_domain::session::{Grammar, Input, Message};

use super::*;

fn chat(body: &str) -> Result<Request, ApiError> {
    read(Task::Chat, body.as_bytes(), 99)
}

fn completion(body: &str) -> Result<Request, ApiError> {
    read(Task::Completion, body.as_bytes(), 99)
}

/// A chat request with these further parameters.
fn with(more: &str) -> Result<Request, ApiError> {
    chat(&format!(r#"{{"model":"m","messages":[{{"role":"user","content":"hi"}}],{more}}}"#))
}

fn prompt(value: &str) -> Result<Vec<Input>, ApiError> {
    completion(&format!(r#"{{"model":"m","prompt":{value}}}"#)).map(|r| r.inputs)
}

#[test]
fn the_least_request_is_enough() {
    let request = chat(r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#).unwrap();
    assert_eq!((request.model.as_str(), request.n, request.stream), ("m", 1, false));
    assert_eq!(request.sampling, Sampling { seed: 99, ..Sampling::default() });
    let message = Message { role: "user".into(), content: "hi".into(), name: None };
    assert_eq!(request.inputs, [Input::Chat(vec![message])]);
}

#[test]
fn null_is_absent() {
    let all = [
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "seed",
        "stop",
        "n",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "ignore_eos",
        "stream",
        "stream_options",
        "user",
        "metadata",
        "store",
        "service_tier",
        "response_format",
        "modalities",
        "tools",
        "tool_choice",
        "functions",
        "function_call",
        "audio",
        "parallel_tool_calls",
        "reasoning_effort",
        "anything",
    ];
    let plain = with(r#""n":1"#).unwrap();
    for name in all {
        assert_eq!(with(&format!(r#""{name}":null"#)).as_ref(), Ok(&plain), "{name}");
    }
    assert!(
        completion(r#"{"model":"m","prompt":"a","echo":null,"suffix":null,"best_of":null,"logprobs":null}"#)
            .is_ok()
    );
}

#[test]
fn every_parameter_arrives() {
    let request = with(
        r#""max_completion_tokens":5,"temperature":0.5,"top_p":0.9,"top_k":40,"min_p":0.1,"seed":-1,"n":2,
           "frequency_penalty":1,"presence_penalty":-1,"repetition_penalty":1.1,"stop":["a","b"],"logprobs":true,
           "top_logprobs":3,"logit_bias":{"17":-100,"4":1.5},"ignore_eos":true,"stream":true,
           "response_format":{"type":"json_schema","json_schema":{"name":"a","strict":true,"schema":{"type":"object"}}},
           "stream_options":{"include_usage":true},"user":"u","metadata":{"a":"b"},"store":false,"tools":[]"#,
    )
    .unwrap();
    assert!(request.stream && request.include_usage && request.n == 2);
    assert_eq!(
        request.sampling,
        Sampling {
            max_tokens: Some(5),
            temperature: Some(0.5),
            top_p: Some(0.9),
            top_k: Some(40),
            min_p: Some(0.1),
            frequency_penalty: 1.0,
            presence_penalty: -1.0,
            repetition_penalty: Some(1.1),
            seed: u64::MAX,
            stop: vec!["a".into(), "b".into()],
            ignore_eos: true,
            logprobs: Some(3),
            logit_bias: [(4, 1.5), (17, -100.0)].into(),
            grammar: Some(Grammar::JsonSchema(r#"{"type":"object"}"#.into())),
        }
    );
}

#[test]
fn a_response_format_is_text_or_json() {
    let grammar = |format: &str| with(&format!(r#""response_format":{format}"#)).unwrap().sampling.grammar;
    assert_eq!(grammar("null"), None);
    assert_eq!(grammar(r#"{"type":"text"}"#), None);
    assert_eq!(grammar(r#"{"type":"json_object"}"#), Some(Grammar::JsonObject));
    let long = format!(
        r#""response_format":{{"type":"json_schema","json_schema":{{"schema":{{"title":"{}"}}}}}}"#,
        "x".repeat(70_000)
    );
    assert_eq!(with(&long).unwrap_err().param.as_deref(), Some("response_format"));
}

#[test]
fn prompts_have_four_forms() {
    let text = |t: &str| Input::Text(t.into());
    for (value, inputs) in [
        (r#""a""#, vec![text("a")]),
        (r#"["a","b"]"#, vec![text("a"), text("b")]),
        ("[1,2]", vec![Input::Tokens(vec![1, 2])]),
        ("[[1],[2,3]]", vec![Input::Tokens(vec![1]), Input::Tokens(vec![2, 3])]),
    ] {
        assert_eq!(prompt(value).unwrap(), inputs, "{value}");
    }
    for bad in
        ["[]", "[[]]", "[1,\"a\"]", "[\"a\",[1]]", "[-1]", "[1.5]", "[4294967296]", "{}", "5", "[[\"a\"]]"]
    {
        assert_eq!(prompt(bad).unwrap_err().param.as_deref(), Some("prompt"), "{bad}");
    }
    assert!(prompt(&format!("[{}]", vec!["\"a\""; 129].join(","))).is_err());
}

#[test]
fn content_parts_of_text_are_joined() {
    let request = chat(
        r#"{"model":"m","messages":[{"role":"developer","content":[{"type":"text","text":"a"},{"text":"b","type":"text"}]},
            {"role":"assistant","content":null,"refusal":null,"tool_calls":[]},{"role":"user","name":"n","content":""}]}"#,
    )
    .unwrap();
    let Input::Chat(messages) = &request.inputs[0] else { panic!("no chat") };
    assert_eq!((messages[0].role.as_str(), messages[0].content.as_str()), ("system", "a\nb"));
    assert_eq!(messages[1].content, "");
    assert_eq!(messages[2].name.as_deref(), Some("n"));
}

#[test]
fn what_is_wrong_or_not_supported_is_named() {
    for (more, param) in [
        (r#""temperature":2.1"#, "temperature"),
        (r#""temperature":-0.1"#, "temperature"),
        (r#""temperature":"hot""#, "temperature"),
        (r#""top_p":1.5"#, "top_p"),
        (r#""top_k":-2"#, "top_k"),
        (r#""top_k":1.5"#, "top_k"),
        (r#""min_p":2"#, "min_p"),
        (r#""max_tokens":0"#, "max_tokens"),
        (r#""max_tokens":-1"#, "max_tokens"),
        (r#""max_tokens":1e30"#, "max_tokens"),
        (r#""max_tokens":1,"max_completion_tokens":2"#, "max_completion_tokens"),
        (r#""n":0"#, "n"),
        (r#""n":129"#, "n"),
        (r#""n":1e9"#, "n"),
        (r#""seed":1.5"#, "seed"),
        (r#""seed":99999999999999999999"#, "seed"),
        (r#""stop":[1]"#, "stop"),
        (r#""stop":"""#, "stop"),
        (r#""stop":{"a":1}"#, "stop"),
        (r#""frequency_penalty":3"#, "frequency_penalty"),
        (r#""presence_penalty":-3"#, "presence_penalty"),
        (r#""repetition_penalty":0"#, "repetition_penalty"),
        (r#""logprobs":5"#, "logprobs"),
        (r#""top_logprobs":2"#, "top_logprobs"),
        (r#""logprobs":true,"top_logprobs":21"#, "top_logprobs"),
        (r#""logit_bias":{"a":1}"#, "logit_bias"),
        (r#""logit_bias":{"1":101}"#, "logit_bias"),
        (r#""logit_bias":[1]"#, "logit_bias"),
        (r#""stream":"yes""#, "stream"),
        (r#""stream_options":{"include_usage":true}"#, "stream_options"),
        (r#""stream":true,"stream_options":{"more":true}"#, "stream_options"),
        (r#""response_format":{"type":"xml"}"#, "response_format"),
        (r#""response_format":{"type":"json_schema"}"#, "response_format"),
        (r#""response_format":{"type":"json_schema","json_schema":{"name":"a"}}"#, "response_format"),
        (r#""response_format":{}"#, "response_format"),
        (r#""tools":[{"type":"function"}]"#, "tools"),
        (r#""functions":[{}]"#, "functions"),
        (r#""tool_choice":"auto""#, "tool_choice"),
        (r#""audio":{"voice":"x"}"#, "audio"),
        (r#""modalities":["text","audio"]"#, "modalities"),
        (r#""store":true"#, "store"),
        (r#""service_tier":"priority""#, "service_tier"),
        (r#""user":5"#, "user"),
        (r#""prompt":"a""#, "prompt"),
        (r#""best_of":2"#, "best_of"),
        (r#""reasoning_effort":"low""#, "reasoning_effort"),
        (r#""min_tokens":3"#, "min_tokens"),
        (r#""whatever":0"#, "whatever"),
    ] {
        let error = with(more).unwrap_err();
        assert_eq!(error.param.as_deref(), Some(param), "{more}: {error}");
        assert!(error.message.contains(param), "{more}: {error}");
        assert_eq!(error.code, crate::openai::Code::BadRequest);
    }
    let stops = format!(r#""stop":[{}]"#, vec!["\"a\""; 1_000_000].join(","));
    assert_eq!(with(&stops).unwrap_err().param.as_deref(), Some("stop"));
}

#[test]
fn a_fault_of_a_message_names_the_message() {
    for (messages, param) in [
        ("[]", "messages"),
        ("{}", "messages"),
        ("\"hi\"", "messages"),
        ("null", "messages"),
        ("[5]", "messages[0]"),
        (r#"[{"role":"user"}]"#, "messages[0]"),
        (r#"[{"content":"a"}]"#, "messages[0]"),
        (r#"[{"role":"user","content":"a"},{"role":"king","content":"a"}]"#, "messages[1].role"),
        (r#"[{"role":"tool","content":"a"}]"#, "messages[0].role"),
        (r#"[{"role":"user","content":5}]"#, "messages[0].content"),
        (
            r#"[{"role":"user","content":[{"type":"image_url","image_url":{}}]}]"#,
            "messages[0].content[0].type",
        ),
        (r#"[{"role":"user","content":[{"type":"text"}]}]"#, "messages[0].content[0]"),
        (r#"[{"role":"assistant","content":"","tool_calls":[{}]}]"#, "messages[0].tool_calls"),
        (r#"[{"role":"user","content":null}]"#, "messages[0]"),
    ] {
        let error = chat(&format!(r#"{{"model":"m","messages":{messages}}}"#)).unwrap_err();
        assert_eq!(error.param.as_deref(), Some(param), "{messages}: {error}");
    }
    let error = chat(r#"{"model":"m"}"#).unwrap_err();
    assert_eq!(error.param.as_deref(), Some("messages"));
}

#[test]
fn completions_refuse_what_they_cannot_do() {
    for (more, param) in [
        (r#""echo":true"#, "echo"),
        (r#""suffix":"x""#, "suffix"),
        (r#""best_of":3"#, "best_of"),
        (r#""logprobs":21"#, "logprobs"),
        (r#""logprobs":true"#, "logprobs"),
        (r#""messages":[{}]"#, "messages"),
        (r#""n":65,"prompt":["a","b"]"#, "n"),
    ] {
        let prompt = if more.contains("prompt") { "" } else { r#","prompt":"a""# };
        let error = completion(&format!(r#"{{"model":"m",{more}{prompt}}}"#)).unwrap_err();
        assert_eq!(error.param.as_deref(), Some(param), "{more}: {error}");
    }
    assert!(
        completion(r#"{"model":"m","prompt":"a","echo":false,"suffix":"","best_of":1,"logprobs":5}"#).is_ok()
    );
    assert_eq!(completion(r#"{"model":"m"}"#).unwrap_err().param.as_deref(), Some("prompt"));
}

#[test]
fn what_is_no_json_says_where() {
    for (body, says) in [
        (&b""[..], "line 1 column 0"),
        (b"{", "line 1 column 1"),
        (b"[]", "a JSON object"),
        (b"5", "a JSON object"),
        (b"null", "a JSON object"),
        (b"{\"model\":\"m\",}", "line 1 column 14"),
        (b"{\"model\":\"m\"} x", "trailing characters"),
        (b"{\"model\":\"\xff\xfe\"}", "line 1 column"),
        (b"\xff\xfe", "line 1 column"),
        (b"{\"model\":\"m\",\"model\":\"n\"}", "twice"),
        (b"{\"model\":\"m\",\"temperature\":NaN}", "line 1 column"),
        (b"{\"model\":\"m\",\"temperature\":1e999}", "out of range"),
    ] {
        let error = read(Task::Chat, body, 0).unwrap_err();
        assert!(error.message.contains(says), "{body:?}: {error}");
        assert_eq!(error.code, crate::openai::Code::BadRequest, "{body:?}");
    }
    let deep = format!("{{\"model\":\"m\",\"metadata\":{}", "[".repeat(1_000_000));
    assert!(read(Task::Chat, deep.as_bytes(), 0).is_err());
}

/// Mutates good bodies: whatever comes out is parsed or refused, and never panics.
#[test]
fn hostile_bodies_are_refused_not_panicked_over() {
    let seeds = [
        r#"{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"a\u00e9\ud83d\ude00"}]}],"n":2,"stop":["x"],"logit_bias":{"1":2.5},"stream":true,"stream_options":{"include_usage":true}}"#,
        r#"{"model":"m","prompt":[[1,2,3],[4]],"logprobs":3,"temperature":0.25,"seed":-5,"max_tokens":10}"#,
        r#"{"model":"m","prompt":["a","b"],"echo":false,"top_k":-1,"metadata":{"a":[{"b":null}]}}"#,
    ];
    let scraps = [
        "null",
        "[",
        "]",
        "{",
        "}",
        "\"",
        ",",
        ":",
        "-",
        "1e400",
        "-0",
        "99999999999999999999",
        "\\u",
        "\\ud800",
        "true",
        "\u{0}",
        "\n",
        "[[[[[[",
        "{}",
        "[]",
        "\"\"",
        "1.5",
        "-1",
        "\u{feff}",
    ];
    let mut rng = fastrand::Rng::with_seed(0x5eed);
    for round in 0..20_000 {
        let mut body = seeds[round % seeds.len()].as_bytes().to_vec();
        for _ in 0..rng.usize(1..6) {
            let at = rng.usize(0..=body.len());
            match rng.u8(0..5) {
                0 if at < body.len() => body[at] = rng.u8(..),
                1 => {
                    let end = (at + rng.usize(0..12)).min(body.len());
                    body.drain(at..end);
                }
                2 => {
                    let scrap = scraps[rng.usize(0..scraps.len())];
                    body.splice(at..at, scrap.bytes());
                }
                3 => body.truncate(at),
                _ => {
                    let end = (at + rng.usize(0..20)).min(body.len());
                    let copy = body[at..end].to_vec();
                    body.splice(at..at, copy);
                }
            }
        }
        for task in [Task::Chat, Task::Completion] {
            if let Err(error) = read(task, &body, 0) {
                assert_eq!(error.code, crate::openai::Code::BadRequest);
                let object: serde_json::Value = serde_json::from_slice(&error.json()).unwrap();
                assert!(object["error"]["message"].is_string());
            }
        }
    }
}
