"""Meanings of the columns of metrics.csv and peers.csv that only some runs have."""

DESCRIBED = {
    "sim_seconds": ("`--links`", "simulated seconds so far, of the slowest peer"),
    "relative_squared_error": (
        "quantized methods",
        "relative squared error of a message, ‖Q(x) - x‖² / ‖x‖², without a unit: the largest of "
        "the peers' last messages; 0 is exact, and a run is warned of 1 or more",
    ),
    "upload_bytes": ("a server", "bytes of the uploads so far"),
    "download_bytes": ("a server", "bytes of the downloads so far"),
    "parameters_k_plus_m": (
        "a server",
        "parameters sent so far by the count of LG-FedAvg's tables",
    ),
    "messages_lost": ("`--faults`", "messages that were sent and did not arrive, so far"),
    "peers_up": ("`--faults`", "peers that were up in the round that ended here"),
    "test_loss_mean": (
        "labels that are no classes",
        "loss on the common test set, by `--loss`: the mean over its examples, then over the peers",
    ),
    "test_loss_max": ("labels that are no classes", "the largest of the peers' losses there"),
    "test_loss_mean_model": (
        "labels that are no classes",
        "loss of the mean of all models there; NaN for models of several kinds",
    ),
    "perplexity_mean": (
        "text",
        "perplexity of the peers on the common test set, mean over the peers: exp of the mean "
        "cross-entropy of a token that counts, where accuracy counts it",
    ),
    "parity_gap_mean": (
        "protected attributes and two labels",
        "gap in demographic parity: the difference between two groups in the share of the common "
        "test set that a model decides 1 for; mean over the attributes, then over the peers",
    ),
    "odds_gap_mean": (
        "protected attributes and two labels",
        "gap in equalized odds: the same among the examples of a label, the larger of both labels; "
        "NaN where a group lacks a label",
    ),
    "adversary_auc_mean": (
        "`--fairness-adversary`",
        "AUC with which the adversary of a peer predicts the protected attributes of the common "
        "test set from the representation, 0.5 for chance; mean over the attributes, then over "
        "the peers",
    ),
    "validation_accuracy_mean": (
        "`--validation`",
        "mean accuracy of the peers on their own validation examples",
    ),
    "accuracy_ensemble": (
        "`--ensemble`",
        "accuracy of the mean output of all honest peers' models on the common test set",
    ),
    "accuracy_vote": (
        "`--ensemble`",
        "accuracy of the vote of these models, a tie going to the lowest label",
    ),
    "backdoor_success_mean": (
        "`--attack backdoor`",
        "share of the triggered test examples that get the attacker's label, mean over the peers",
    ),
    "trust_mean": (
        "`--algorithm fltrust`",
        "mean score of the honest peers by the server's rule, NaN for one without scores",
    ),
    "trust_mean_attackers": ("`--algorithm fltrust`", "mean score of the attackers"),
}
"""Column of metrics.csv -> (the runs that have it, its meaning)."""

PEERS = {
    "peer": "the peer",
    "rank": "the rank that hosted it in the last launch",
    "degree": "its neighbours, where peers have neighbours",
    "n_train": "its training examples",
    "labels": "how many of each label, `label:count`",
    "accuracy": "accuracy of its model on the common test set",
    "test_loss": "mean loss of its model on the common test set, where labels are no classes",
    "perplexity": "perplexity of its model on the common test set, of text",
    "parity_gap": "its gap in demographic parity, with protected attributes and two labels",
    "odds_gap": "its gap in equalized odds, there",
    "adversary_auc": "AUC of its adversary (`--fairness-adversary`)",
    "local_accuracy": "accuracy on its own test examples",
    "validation_accuracy": "accuracy on its own validation examples (`--validation`)",
    "train_loss": "mean loss on its own training examples",
    "backdoor_success": "success of the backdoor in its model (`--attack backdoor`)",
    "trust": "its score by the server's rule (`--algorithm fltrust`)",
    "is_attacker": "1 for an attacker, where there are any",
    "payload_bytes_sent": "bytes of the messages that it sent",
    "payload_bytes_received": "bytes that the server sent to it, where there is one",
    "relative_squared_error": "that of its last message, of quantized methods",
}
"""Column of peers.csv -> its meaning."""
