"""Networks that classify handwritten digits: multi-layer perceptrons and convolutional networks."""

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def input_fn(path):
    """Return 1,437 training and 360 validation images of 8 x 8 pixels, scaled to 0..1.

    `path` is the ensemble's `data`; it is unused, because scikit-learn includes these images.
    """
    digits = load_digits()
    images = (digits.images / 16.0).astype("float32")[..., None]
    x, x_validation, y, y_validation = train_test_split(
        images, digits.target, test_size=0.2, random_state=0, stratify=digits.target
    )
    return (x, y), (x_validation, y_validation)


def model_fn(config):
    """Build and compile the network that a member's `config` describes."""
    body = perceptron(config) if config["kind"] == "mlp" else convolutional(config)
    model = keras.Sequential([keras.Input((8, 8, 1)), *body, keras.layers.Dense(10)])
    model.compile(
        optimizer=keras.optimizers.Adam(config["learning_rate"]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def perceptron(config):
    """Return the layers of a fully connected network with dropout."""
    layers = [keras.layers.Flatten()]
    for _ in range(config["layers"]):
        layers += [keras.layers.Dense(config["units"], activation="relu"), keras.layers.Dropout(0.2)]
    return layers


def convolutional(config):
    """Return layers of 3 x 3 convolutions, one pooling, and a fully connected layer with dropout."""
    layers = []
    for _ in range(config["layers"]):
        layers += [keras.layers.Conv2D(config["filters"], 3, padding="same", activation="relu")]
    return [
        *layers,
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(128, activation="relu"),
    ]
